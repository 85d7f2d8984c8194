//! Factor rules: how an op computes with tensors that are cut.
//!
//! A rule writes each dim of each operand and result as a product of *factors*, major first. A factor that stands in
//! several tensors is one index of the op: cut in one of them, it can be cut in all. `([i,k],[k,j])->([i,j])` with `k` a
//! [`Kind::Sum`] is a matrix product: with `i` cut, each device has rows of the result; with `k` cut, each has an addend of
//! the whole of it.
//!
//! | module | has |
//! |---|---|
//! | [`mod@rule`] | rules: factors, their kinds, what stands where |
//! | [`attributes`] | what an op says of itself besides its operands |
//! | [`rules`] | the rules of the ops that are known |
//! | [`text`] | rules as text, and from it: a user's rule is data |
//!
//! The factors and their kinds are those of Shardy, and so are the names of the ops: those of StableHLO.

pub mod attributes;
pub mod rule;
pub mod rules;
pub mod text;

pub use attributes::{Attribute, Attributes};
pub use rule::{Factor, Kind, Reduction, Rule, UNKNOWN};
pub use rules::{is_elementwise, is_known, rule};

#[cfg(test)]
mod tests;
