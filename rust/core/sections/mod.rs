//! Packed dims: a dim that is several parts one after the other (rule 2.9).
//!
//! dim := part + part + …; part := (f₁ f₂ … fₘ), major first, of which at most one factor fⱼ is cut, by axes or sub-axes of
//! the mesh, under an uneven rule that acts on fⱼ in whole elements of it, or in units of u of them, of which the last may be
//! short (rule 2.13): then it is cut at multiples of u only. With I = ∏ f₍>j₎ the shard [lo, hi) of a part that begins
//! at `base` is, for o in 0 … ∏ f₍<j₎ − 1, the interval `base + o·fⱼ·I + [lo·I, hi·I)`. A holder's array along the dim is
//! its parts one after the other.
//!
//! | module | answers |
//! |---|---|
//! | [`spec`] | what a layout says of a packed dim, before its shape is known |
//! | [`part`] | one part of a dim of known size |
//! | [`dim`] | all parts of a dim: shard index → intervals, position → shard index and back |
//!
//! [`crate::packed`] applies a layout with such dims to a shape. Unlike those of a plain dim, different shards of a packed dim may hold the same elements: where a part is cut by fewer
//! axes than another, the devices that differ in the other axes only hold the same shard of it. The first of them, whose
//! index over those axes is 0, is the canonical one.

pub mod dim;
pub mod part;
pub mod spec;

pub use spec::{DimSpec, Factor, Pad, PartSpec};

/// The most parts that a dim may have.
pub const MOST_PARTS: usize = 1 << 16;

/// The most factors that a part may have.
pub const MOST_FACTORS: usize = 64;
