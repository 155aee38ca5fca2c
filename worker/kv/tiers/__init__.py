"""KV memory below the main pool: host memory and a slab file on NVMe, and the traffic to and from them."""
