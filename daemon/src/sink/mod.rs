//! 7. OUT: where finished profiles go. [`file::write`] puts one in a file, whole or not at all.

pub mod file;
