"""From a step's plan to sampled tokens: tensors, the model, the sampler."""
