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

impl Computation {
    /// True if numbers of values are in range, operands made before they are taken, and ranks those of the rules.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let mut known = self.inputs;
        let fits = |rule: &Rule, values: &[&usize]| {
            let ranked = |(at, value): (usize, &&usize)| self.shapes[**value].len() == rule.rank(at);
            rule.tensors() == values.len() && values.iter().enumerate().all(ranked)
        };
        let op = |op: &Op| {
            let values: Vec<&usize> = op.operands.iter().chain(&op.results).collect();
            let made = op.results.iter().copied().eq(known..known + op.results.len());
            let before = op.operands.iter().all(|operand| *operand < known);
            known += op.results.len();
            let bodied = |body: &Self| [body.inputs, body.outputs.len()] == [op.operands.len(), op.results.len()];
            made && before
                && known <= self.shapes.len()
                && match &op.does {
                    Does::Constant => values.len() == 1,
                    Does::Barrier => op.operands.len() == op.results.len(),
                    Does::Call(body) => bodied(body),
                    Does::Loop(body, _) => bodied(body) && op.operands.len() == op.results.len(),
                    Does::While([test, body]) => {
                        let tested = [test.inputs, test.outputs.len()] == [op.operands.len(), 1];
                        tested && bodied(body) && op.operands.len() == op.results.len()
                    }
                    Does::Case(branches) => {
                        let fits = |body: &Arc<Self>| {
                            [body.inputs + 1, body.outputs.len()] == [op.operands.len(), op.results.len()]
                        };
                        !branches.is_empty() && branches.iter().all(fits)
                    }
                    Does::Constraint(to) => {
                        values.len() == 2 && op.results.len() == 1 && to.axes.len() == self.shapes[op.results[0]].len()
                    }
                    Does::Rule(ruled) => fits(&ruled.rule, &values),
                }
        };
        let sound = self.inputs <= self.shapes.len() && self.ops.iter().all(op);
        sound
            && known == self.shapes.len()
            && self.dtypes.len() == self.shapes.len()
            && self.outputs.iter().all(|output| *output < known)
    }
}
