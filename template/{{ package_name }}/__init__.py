"""Train a model with PyTorch DistributedDataParallel. Start reading in train.py."""
