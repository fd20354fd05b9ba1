"""Write the model of a run as an ONNX file, with an example input from the job itself."""
