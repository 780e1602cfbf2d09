"""m3_core"""
