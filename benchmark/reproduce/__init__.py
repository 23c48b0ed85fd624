"""What do the sources' experiments give where no impossible figure may be reported?"""
