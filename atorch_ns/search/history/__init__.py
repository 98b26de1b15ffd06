"""The history of searches: a file from which a killed search resumes and later searches begin."""
