"""The process that calls us and its disk: forks, kernels kept on disk, launches that Triton's interpreter runs."""
