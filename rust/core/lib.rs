//! Exact shard arithmetic: which box of an array each device of a mesh holds, where an element lives, and back.
//!
//! The modules follow the words of the field, each resting on those before it:
//!
//! | module | answers |
//! |---|---|
//! | [`index`] | mixed-radix numbers: products, strides, division by a fixed divisor |
//! | [`region`] | the algebra of boxes |
//! | [`mesh`] | named axes with sizes; device index ↔ coordinate |
//! | [`assignment`] | the assignment of rows to columns that costs least |
//! | [`sub_axis`] | the factors of a mesh axis |
//! | [`layout`] | which mesh axes cut which tensor dims |
//! | [`uneven`] | how a dim that does not divide is cut |
//! | [`partition`] | a layout applied to a shape: boxes, shard ids, replicas |
//! | [`sections`], [`packed`] | packed dims: several parts one after the other; layouts with them, applied to a shape |
//! | [`locate`] | global offset ↔ shard id and local offset |
//! | [`runs`] | the contiguous runs of a box |
//! | [`tiling`] | who holds which boxes: partitions, grids, flat ranges, explicit boxes |
//! | [`plan`] | from one tiling to another: transfers, rounds, programs |
//! | [`rules`] | which of many regular expressions match a path |
//! | [`pickle`] | what a Python pickle says, with nothing of it run |
//! | [`dcp`] | the index of PyTorch's distributed checkpoints, from its pickle |
//! | [`dtensor`] | TensorFlow's mesh and layout: their text and wire format |
//! | [`factor`] | how an op computes with tensors that are cut |
//! | [`collective`] | the same as a short sequence of collectives, and what they cost |
//! | [`computation`] | values, and ops between inputs and results |
//! | [`propagate`] | what layouts come out of an op, and what it computes with |
//! | [`copy`] | the same from memory to memory |
//!
//! Sizes and offsets are `i64` and never negative; every product of sizes is checked. Nothing here knows of Python,
//! does I/O or writes `unsafe`, except the strided copies of [`copy`].
//!
//! ```
//! use shardwise_core::{layout::Layout, mesh::Mesh, partition::Partition, uneven::Uneven};
//! use std::sync::Arc;
//!
//! let mesh = Arc::new(Mesh::new(&["data", "model"], &[2, 4])?);
//! let layout = Arc::new(Layout::new(mesh, &[&["data"][..], &["model"]], &[])?);
//! let partition = Partition::new(layout, &[6, 8], Uneven::Even)?;
//! assert_eq!(partition.box_of(5)?, [(3, 6), (2, 4)]);
//! assert_eq!(partition.locate_one(27)?, (5, 1)); // row 3, column 3: shard 5, its row 0, column 1
//! # Ok::<(), shardwise_core::error::Error>(())
//! ```

#![deny(unsafe_code)]

/// The examples of the crate's README, which are run as those of the code are.
#[cfg(doctest)]
#[doc = include_str!("README.md")]
struct Readme;

pub mod assignment;
pub mod collective;
pub mod computation;
pub mod copy;
pub mod dcp;
pub mod dtensor;
pub mod error;
pub mod factor;
pub mod index;
pub mod layout;
pub mod locate;
pub mod mesh;
pub mod packed;
pub mod parallel;
pub mod partition;
pub mod pickle;
pub mod plan;
pub mod propagate;
pub mod region;
mod room;
pub mod rules;
pub mod runs;
pub mod sections;
mod shards;
pub mod short;
pub mod shown;
pub mod sub_axis;
pub mod tiling;
pub mod uneven;

pub use index::radix;
