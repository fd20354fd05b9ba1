-- A site that changes what it is given: the partition, the time limit, the name and the comment of each job.
function slurm_job_submit(job, partitions, uid)
   job.partition = "high"
   job.time_limit = 10
   job.name = "site-" .. (job.name or "")
   job.comment = "project 7"
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
