//! The ops of a computation with the layouts that its values begin with.

use std::{collections::HashMap, ops::Deref, sync::Arc};

use super::{axes, node::Way, ops::Ops, project::Specs};
use crate::{
    error::{Error, Result},
    mesh::Mesh,
    sub_axis::SubAxis,
};

/// The layout that a value begins with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Start {
    /// The axes of its dims.
    pub specs: Specs,
    /// True for each dim that may take more.
    pub open: Vec<bool>,
    /// When each dim gets its axes: those of 0 first, and only when nothing changes any more the others, in their order.
    pub priorities: Vec<u32>,
}

/// The layouts that inputs, and those that results begin with.
pub type Starts = [Vec<Option<Arc<Start>>>; 2];

/// The ops of a computation, with the layouts that its values begin with.
#[derive(Debug)]
pub struct Flow {
    /// The mesh of all layouts.
    pub mesh: Arc<Mesh>,
    /// The layout that each value begins with.
    pub starts: Vec<Option<Arc<Start>>>,
    ops: Arc<Ops>,
}

impl Deref for Flow {
    type Target = Ops;

    fn deref(&self) -> &Ops {
        &self.ops
    }
}

impl Flow {
    /// The flow of the ops of a computation whose inputs and results begin with these layouts.
    ///
    /// # Errors
    /// Those of a constraint with an axis that the mesh does not have, or with one twice.
    pub fn new(ops: &Arc<Ops>, mesh: &Arc<Mesh>, [inputs, results]: Starts) -> Result<Self> {
        let mut flow = Self { mesh: mesh.clone(), starts: inputs, ops: ops.clone() };
        flow.starts.resize(ops.shapes.len(), None);
        for (output, start) in ops.outputs.iter().zip(results) {
            flow.starts[output.values[1]] = start;
        }
        for (result, constraint) in &ops.constraints {
            let named = |name: &String| SubAxis::named(mesh, name, || constraint.place.clone());
            let specs = constraint.axes.iter().map(|axes| axes.iter().map(named).collect());
            let specs = specs.collect::<Result<Specs>>()?;
            if let Some((first, dim, axis)) = axes::repeated(&specs) {
                let (place, first) = (format!("{}[{dim}]", constraint.place), format!("axes[{first}]"));
                return Err(Error::RepeatedAxis { place, name: axis.name(mesh), first });
            }
            let (open, priorities) = (constraint.open.clone(), vec![0; constraint.open.len()]);
            flow.starts[*result] = Some(Arc::new(Start { specs, open, priorities }));
        }
        if !ops.constraints.is_empty() {
            flow.constrain();
        }
        Ok(flow)
    }

    /// Gives the operand of a constraint its layout too, if it is free and no other constraint differs.
    fn constrain(&mut self) {
        let mut constraints: Vec<(usize, Vec<usize>)> = Vec::new();
        for node in self.nodes.iter().filter(|node| node.way == Way::Constraint) {
            let [operand, result] = [node.values[0], node.values[1]];
            match constraints.iter_mut().find(|(known, _)| *known == operand) {
                Some((_, results)) => results.push(result),
                None => constraints.push((operand, vec![result])),
            }
        }
        let mut is_edge = vec![false; self.shapes.len()];
        for node in self.nodes.iter().filter(|node| node.way == Way::Edge) {
            is_edge[node.values[node.values.len() - 1]] = true;
        }
        for (operand, results) in constraints {
            let start = self.starts[results[0]].clone();
            let alike = results.iter().all(|result| self.starts[*result] == start);
            let closed = start.as_ref().is_some_and(|start| !start.open.contains(&true));
            if self.starts[operand].is_some() || !alike || !closed {
                continue;
            }
            if is_edge[operand] || self.same[operand] != operand {
                Arc::make_mut(&mut self.ops).take_over(operand, results[0]);
            } else {
                self.starts[operand] = start;
            }
        }
    }
}

impl Ops {
    /// Layouts to begin with as these, with which inputs that a step replaces, such as weights, spread last; none if no input is as
    /// a result.
    #[must_use]
    pub fn replaced_last(&self, [inputs, results]: &Starts) -> Option<Starts> {
        let key =
            |value: usize, start: &Arc<Start>| (self.shapes[value].clone(), self.dtypes[value].clone(), start.clone());
        let later = |start: &Arc<Start>| {
            let priorities = start.priorities.iter().map(|priority| priority.saturating_add(1)).collect();
            Arc::new(Start { priorities, ..Start::clone(start) })
        };
        let mut made: HashMap<_, usize> = HashMap::new();
        for (output, start) in self.outputs.iter().zip(results) {
            if let Some(start) = start.as_ref().filter(|start| !start.specs.is_empty()) {
                *made.entry(key(output.values[1], start)).or_default() += 1;
            }
        }
        let of_input = |(value, start): (usize, &Option<Arc<Start>>)| {
            let start = start.as_ref()?;
            match made.get_mut(&key(value, start)).filter(|left| **left > 0) {
                Some(left) => {
                    *left -= 1;
                    Some(later(start))
                }
                None => Some(start.clone()),
            }
        };
        let found: Vec<_> = inputs.iter().enumerate().map(of_input).collect();
        (found != *inputs).then(|| [found, results.iter().map(|start| start.as_ref().map(later)).collect()])
    }
}
