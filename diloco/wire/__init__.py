"""What replicas send to each other: number formats, packing, compressors, exchange."""
