def main():
    from mgpu_slurm import Run, submit

    def train(run: Run, config: dict) -> dict:
        return {"answer": run.mean(float(config["lr"]), 1)}

    handle = submit(train, {"lr": 0.5}, executor="local", name="pickled")
    handle.wait()
    print(handle.result())


main()
