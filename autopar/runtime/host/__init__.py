"""Services of the machine a rank runs on: files, pages, pinned memory, time limits, buckets of bytes.

A request for bytes turns into memory that a copy engine can read, or that lies in a file, with an error that names the
way out where there is none. Nothing here knows of plans or parameters, so each service is tested by itself.
"""
