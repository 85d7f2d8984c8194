//! Bytes of tensors between files and memory.

pub mod digest;
pub mod error;
pub mod faults;
pub mod file;
