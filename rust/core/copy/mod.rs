//! From memory to memory: strided arrays of raw bytes, copied on all cores (rule 2.6).
//!
//! | module | answers |
//! |---|---|
//! | [`strided`] | an array in memory: address, item size, extents and strides |
//! | [`overlap`] | whether two of them share a byte |
//! | `form` | how a box lies in two arrays: in rows, and blocks of rows |
//! | `kernel` | the copying of rows |
//! | `stream` | the same past the cache |
//! | [`contest`] | which of the two is faster here |
//! | `blocks` | which boxes are copied side by side, and in which order |
//! | `choices` | what depends on sizes: blocks, parts, threads |
//! | `tuning` | the numbers that were measured, and how to measure them again |
//! | [`run`] | a whole plan, on all cores |
//! | `sides` | where a plan's boxes lie in the arrays that it is run on |
//! | `strips` | many short boxes, found by the workers that copy them |

#[allow(unsafe_code)]
mod blocks;
mod choices;
pub mod contest;
mod form;
#[allow(unsafe_code)]
mod kernel;
pub mod overlap;
pub mod run;
mod sides;
#[allow(unsafe_code)]
mod stream;
#[allow(unsafe_code)]
pub mod strided;
mod strips;
mod tuning;
