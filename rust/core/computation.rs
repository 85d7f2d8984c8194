//! Computations: inputs, ops in order, results. The body of a call or a loop is a computation too.

use std::sync::Arc;

use crate::factor::Rule;

/// A computation: its values are numbered, inputs first, then the results of the ops in order.
///
/// Numbers of values are in range, an op's operands made before it, and the values of a body those of its op.
#[derive(Debug)]
pub struct Computation {
    /// The shape of each value.
    pub shapes: Vec<Arc<[i64]>>,
    /// The name of the dtype of each.
    pub dtypes: Vec<Arc<str>>,
    /// The number of inputs.
    pub inputs: usize,
    /// The ops in order.
    pub ops: Vec<Op>,
    /// The values that are results.
    pub outputs: Vec<usize>,
}

/// An op of a computation.
#[derive(Debug)]
pub struct Op {
    /// The values that it takes.
    pub operands: Vec<usize>,
    /// The values that it makes.
    pub results: Vec<usize>,
    /// The way in which it makes them.
    pub does: Does,
}

/// The ways in which ops make their results.
#[derive(Debug)]
pub enum Does {
    /// The results are numbers that are known.
    Constant,
    /// The results are the operands.
    Barrier,
    /// A computation, run once.
    Call(Arc<Computation>),
    /// A computation of as many results as inputs, run as often as is said.
    Loop(Arc<Computation>, i64),
    /// The second computation, run on what it gave before, as long as the first gives true.
    While([Arc<Computation>; 2]),
    /// The computation of these that the first operand numbers; it takes the other operands.
    Case(Vec<Arc<Computation>>),
    /// The result is the operand, in a layout.
    Constraint(Arc<Constraint>),
    /// A factor rule.
    Rule(Arc<Ruled>),
}

/// A layout that an op gives its operand.
#[derive(Debug)]
pub struct Constraint {
    /// The axes of each dim.
    pub axes: Vec<Vec<String>>,
    /// True for each dim that may have more.
    pub open: Vec<bool>,
    /// The op in the computation and its line of the source, for messages.
    pub place: String,
}

/// An op with a factor rule, one for all that are alike.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Ruled {
    /// The name of the op.
    pub name: String,
    /// The factor rule of the op, with sizes.
    pub rule: Rule,
    /// The shapes of its operands and results.
    pub shapes: Vec<Arc<[i64]>>,
    /// The dim of the features in the first operand of a convolution.
    pub feature: Option<usize>,
}
