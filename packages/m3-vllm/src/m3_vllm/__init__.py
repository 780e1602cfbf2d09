"""m3_vllm"""
