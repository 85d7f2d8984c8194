//! Layouts through ops: what comes out of an op whose operands are cut, and how it computes.
//!
//! The layouts of operands and results are projected to the factors of the op's rule ([`crate::factor`]), decided there, and
//! projected back. Where they disagree a [`Policy`] decides.
//!
//! | module | answers |
//! |---|---|
//! | `op` | an op with layouts, and how it computes |
//! | `whole` | the layouts of all values of a computation |
//! | `lower` | how its ops compute, and what must move for each |
//! | `settle` | that, by each policy |
//! | `axes` | which lists of axes begin one another, or share a part |
//! | `project` | layout → cuts of factors, and back |
//! | `agree` | what tensors without a layout take over from the others |
//! | `meet` | the cuts that an op computes with, if its tensors differ |
//! | `least` | those that move the fewest bytes |

mod agree;
mod axes;
mod least;
mod lower;
mod meet;
mod op;
mod project;
mod settle;
mod whole;

pub use lower::{Lowered, lower};
pub use op::{Conflict, Op, Policy, Settled, Specs};
pub use settle::settle;
pub use whole::{Flow, Node, Start, Way, layouts};
