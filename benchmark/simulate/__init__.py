"""What would a recipe serve on a machine that is not here?"""
