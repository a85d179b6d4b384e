"""Uses of a trained model: predictions, exports to other formats, pretrained weights."""
