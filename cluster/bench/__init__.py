"""`decodefleet bench serve`: loads any OpenAI-compatible endpoint and reports what its clients feel.

workload, traces, prompts    what is asked, and when
http, load                   asking it, as lightly as one core allows
stream, summary              what came back, as numbers
report, command              numbers for people and for files
"""
