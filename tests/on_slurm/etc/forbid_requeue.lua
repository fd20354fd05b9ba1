-- A site that forbids requeueing: whatever a submission asks for, its job may not be requeued.
function slurm_job_submit(job, partitions, uid)
   job.requeue = 0
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   job.requeue = 0
   return slurm.SUCCESS
end
