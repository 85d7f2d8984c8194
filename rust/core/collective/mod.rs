//! A change of layout as a short sequence of collectives, and what each costs.
//!
//! | module | answers |
//! |---|---|
//! | [`views`] | the sub-axes that two meshes over one list of devices have in common |
//! | [`kinds`] | the collectives, and what each makes of a layout |
//! | [`cost`] | bytes and seconds of a collective, by a model of the links |
//! | [`given`](mod@given) | the same of a given sequence |
//! | [`search`] | the cheapest sequence from one partition to another that a bounded search finds |
//!
//! A layout is a [`State`](kinds::State): which factors of the mesh axes cut each dim, in which order, and over which
//! the values are partial sums. Every collective is a move to another state. All of this supposes that dims divide at
//! every state; if they do not, shards of one state are not unions of those of the next. Where there is no sequence, an
//! [`Obstacle`] says why.

pub mod cost;
pub mod given;
pub mod kinds;
mod obstacle;
pub mod search;
pub mod views;

pub use obstacle::Obstacle;
