//! Layouts through ops: what comes out of an op whose operands are cut, and how it computes.
//!
//! The layouts of operands and results are projected to the factors of the op's rule ([`crate::factor`]), decided there, and
//! projected back. Where they disagree a [`Policy`] decides.
//!
//! | module | answers |
//! |---|---|
//! | `op` | how an op computes |
//! | `node` | an op of a computation, or an edge |
//! | `ops` | a computation as one list of ops, and edges into calls and loops |
//! | `flow` | the same with the layouts that values begin with |
//! | `copies` | constants made anew for each use |
//! | `uses` | which ops make and use a value |
//! | `numbered` | layouts by number |
//! | `whole` | the layouts of all its values, as Shardy's passes give them |
//! | `explicit` | those that JAX's explicit mode gives, or where it gives none |
//! | `reshaped` | what it gives for reshapes |
//! | `lower` | how its ops compute, and what must move for each |
//! | `settle` | the same of one op, some of whose tensors have no layout |
//! | `axes` | which lists of axes begin one another, or share a part |
//! | `project` | layout → cuts of factors, and back |
//! | `agree` | what tensors without a layout take over from the others |
//! | `meet` | the cuts that an op computes with, if its tensors differ |
//! | `least` | those that move the fewest bytes |

mod agree;
mod axes;
mod copies;
mod explicit;
mod flow;
mod least;
mod lower;
mod meet;
mod node;
mod numbered;
mod op;
mod ops;
mod project;
mod reshaped;
mod settle;
mod uses;
mod whole;

pub use explicit::Disagreement;
pub use flow::{Flow, Start, Starts};
pub use lower::{Propagated, propagate};
pub use node::{Node, Part, Way};
pub use op::{Lowered, Policy};
pub use ops::{Bodies, Made, Ops};
pub use project::Specs;
pub use settle::{Op, settle};
