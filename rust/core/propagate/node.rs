//! An op as layouts go through it, or an edge into a call or a loop, or out of it.

use std::sync::Arc;

use crate::{computation::Ruled, factor::is_elementwise};

/// In which round, and in which direction, layouts go through an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Elementwise: first, both ways; its tensors are alike.
    Alike,
    /// A reshape or a transpose: first, both ways.
    First,
    /// A slice at a place that only the run tells, or an update of one: first, forward.
    Forward,
    /// A broadcast: backward before forward.
    Broadcast,
    /// An edge into a call or a loop, or out of it, from one value or several into one: first, both ways, however many use them.
    Edge,
    /// A constraint on a layout: as one that is elementwise, but its operand takes the layout of its result.
    Constraint,
    /// All others.
    Later,
}

impl Way {
    pub(super) fn of(op: &str) -> Self {
        match op {
            "reshape" | "transpose" => Self::First,
            "dynamic_slice" | "dynamic_update_slice" => Self::Forward,
            "broadcast_in_dim" => Self::Broadcast,
            _ if is_elementwise(op) => Self::Alike,
            _ => Self::Later,
        }
    }
}

/// The part of an op that a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it.
    Op,
    /// An edge of an operand into a call.
    Operand,
    /// An edge to a result of a call or a loop.
    Result,
    /// The edge to a result of the computation.
    Output,
}

/// An op as layouts go through it, or an edge.
#[derive(Debug, Clone)]
pub struct Node {
    /// The op with its rule; for an edge or a constraint the identity.
    pub ruled: Arc<Ruled>,
    /// When layouts go through it.
    pub way: Way,
    /// The numbers of its operands, then of its results.
    pub values: Vec<usize>,
    /// The part of its op that it is.
    pub part: Part,
    /// The place of that op in [`Ops::places`](super::Ops::places).
    pub place: usize,
    /// The number of times that it is computed.
    pub times: i64,
}

impl Node {
    /// True if it has no rule of its own: its operands need the layout of its result.
    pub(super) fn is_edge(&self) -> bool {
        matches!(self.way, Way::Edge | Way::Constraint)
    }

    /// True if each dim of its tensors that have dims is one factor, the same of all, which passes.
    pub(super) fn is_even(&self) -> bool {
        self.way == Way::Alike || self.is_edge()
    }
}
