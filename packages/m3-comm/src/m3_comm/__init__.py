"""m3_comm"""
