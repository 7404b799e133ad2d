"""Services of the machine a rank runs on: files, pages, pinned memory, time limits, buckets of bytes."""
