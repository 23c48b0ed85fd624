"""What becomes of the sources' experiments where nothing impossible may be told?"""
