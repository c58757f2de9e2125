"""What a model is worth and where its time goes: accuracy, throughput, routing."""
