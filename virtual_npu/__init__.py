"""How does the NPU path run where there is no NPU?"""
