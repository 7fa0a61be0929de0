"""ddpgen: writes plain PyTorch DistributedDataParallel projects and keeps them up to date."""

__version__ = "0.1.0"
