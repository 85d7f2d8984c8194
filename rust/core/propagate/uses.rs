//! The uses of the values of a computation.

use std::{collections::HashMap, sync::Arc};

use super::node::{Node, Way};
use crate::computation::Ruled;

/// The uses of the values of a computation, whatever their layouts.
#[derive(Debug, Clone)]
pub(super) struct Uses {
    /// For each value the ops that make or use it: those within a loop, the maker, the users last to first, as often as they do.
    pub(super) of: Vec<Vec<usize>>,
    /// The number of the rule of each op, of the results' edges too.
    pub(super) rules: Vec<u32>,
    /// True for each op of whose operands one has other users.
    pub(super) shared: Vec<bool>,
}

impl Uses {
    /// The uses of values of these shapes, each with the layout of one that is the `same`, in ops and edges to results.
    pub(super) fn new(shapes: &[Arc<[i64]>], same: &[usize], ops: &[Node], outputs: &[Node]) -> Self {
        let count = shapes.len();
        let (mut of, mut users, mut makers) = (vec![Vec::new(); count], vec![Vec::new(); count], vec![None; count]);
        let mut uses = vec![0; count];
        for (number, node) in ops.iter().enumerate() {
            let (operands, results) = node.values.split_at(node.ruled.rule.operands());
            for operand in operands {
                uses[*operand] += 1;
                let owner = same[*operand];
                let held = if owner == *operand { &mut users } else { &mut of };
                held[owner].push(number);
            }
            for result in results {
                makers[*result] = Some(number);
            }
        }
        for (value, of) in of.iter_mut().enumerate() {
            of.reverse();
            of.extend(makers[value].into_iter().chain(users[value].iter().rev().copied()));
        }
        for output in outputs {
            uses[output.values[0]] += 1;
        }
        let many = |value: &usize| uses[*value] != 1 && !shapes[*value].is_empty();
        let is_shared =
            |node: &Node| node.way != Way::Edge && node.values[..node.ruled.rule.operands()].iter().any(many);
        let mut rules: HashMap<*const Ruled, u32> = HashMap::new();
        let mut rule = |node: &Node| {
            let next = rules.len() as u32;
            *rules.entry(Arc::as_ptr(&node.ruled)).or_insert(next)
        };
        let nodes = || ops.iter().chain(outputs);
        Self { of, rules: nodes().map(&mut rule).collect(), shared: nodes().map(is_shared).collect() }
    }
}
