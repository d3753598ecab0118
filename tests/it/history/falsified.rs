//! False histories.
