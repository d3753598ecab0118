//! Small histories, each true or false for a reason that can be seen.
