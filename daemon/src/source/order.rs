//! Merges the streams of all sources into one, by time.
