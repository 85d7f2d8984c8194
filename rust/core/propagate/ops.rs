//! The ops of a computation and of its bodies, as one list, with edges into calls and loops and out of them.
//!
//! Constants, and what is made of constants or of one scalar, are made anew for each use, as Shardy does.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use super::{
    copies::Copies,
    node::{Node, Part, Way},
    uses::Uses,
};
use crate::{
    computation::{Computation, Constraint, Does, Op, Ruled},
    error::Result,
    factor::{Attributes, rule},
};

/// The ops of the bodies of a loop or a case, which are one after the other.
#[derive(Debug, Clone)]
pub struct Bodies {
    /// The first node, and the place after the last of each body; after the last body there are the edges to the results.
    pub bounds: Vec<usize>,
    /// The values that the bodies of a loop take, those of its test first.
    pub inner: Vec<usize>,
    /// The number of times that a loop is computed, if it is known.
    pub trips: Option<i64>,
    /// The value that says whether a loop goes on, or which body of a case is computed.
    pub decides: Option<usize>,
}

/// A constant that an op makes: its value, the op's place, and the values that it makes it of.
#[derive(Debug, Clone)]
pub struct Made {
    /// The value.
    pub value: usize,
    /// The place of the op in [`Ops::places`].
    pub place: usize,
    /// The operands.
    pub operands: Vec<usize>,
}

/// The values and ops of a computation and of all its bodies, one after the other.
#[derive(Debug, Clone, Default)]
pub struct Ops {
    /// The shape of each value.
    pub shapes: Vec<Arc<[i64]>>,
    /// The name of the dtype of each.
    pub dtypes: Vec<Arc<str>>,
    /// The number that each has in its own computation.
    pub origins: Vec<usize>,
    /// The value whose layout each has: itself, or for an input of a loop's body that of the loop's result.
    pub same: Vec<usize>,
    /// The number of values that are given, which are the first.
    pub inputs: usize,
    /// The ops in order.
    pub nodes: Vec<Node>,
    /// An edge from each value that is a result to the number that the result has.
    pub outputs: Vec<Node>,
    /// The constants.
    pub constants: Vec<Made>,
    /// The bodies of loops and cases, those within another before it.
    pub bodies: Vec<Bodies>,
    /// For each value of the computation itself its number here; of several copies that of the last.
    pub numbers: Vec<Option<usize>>,
    /// The places of ops: that of the op whose body each is in, and its number there. The bodies of a loop with a test, and those
    /// of a case, have places too.
    pub places: Vec<(Option<usize>, usize)>,
    /// Constraints, each with its result.
    pub(super) constraints: Vec<(usize, Arc<Constraint>)>,
    edges: HashMap<(Arc<[i64]>, usize), Arc<Ruled>>,
    /// The uses of values, worked out when they are first asked for.
    pub(super) uses: OnceLock<Uses>,
}

impl Ops {
    /// The ops of a computation.
    ///
    /// # Errors
    /// Those of an edge of more dims than a rule has.
    pub fn new(computation: &Computation) -> Result<Self> {
        let numbers = vec![None; computation.shapes.len()];
        let mut ops = Self { inputs: computation.inputs, numbers, ..Self::default() };
        let taken = ops.taken(computation);
        for value in ops.body(computation, &taken, 1, None)? {
            let result = ops.add(&ops.shapes[value].clone(), &ops.dtypes[value].clone(), ops.origins[value]);
            let edge = ops.edge(Part::Output, 0, vec![value, result], 1)?;
            ops.outputs.push(edge);
        }
        Ok(ops)
    }

    /// The number of an op in the computation, then in the body of that op, and so on.
    #[must_use]
    pub fn path(&self, place: usize) -> Vec<usize> {
        let (within, number) = self.places[place];
        let mut path = within.map_or_else(Vec::new, |within| self.path(within));
        path.push(number);
        path
    }

    /// The shapes of the values of a node.
    pub(super) fn shapes_of(&self, node: &Node) -> Vec<&[i64]> {
        node.values.iter().map(|value| &*self.shapes[*value]).collect()
    }

    fn add(&mut self, shape: &Arc<[i64]>, dtype: &Arc<str>, origin: usize) -> usize {
        self.shapes.push(shape.clone());
        self.dtypes.push(dtype.clone());
        self.origins.push(origin);
        self.same.push(self.same.len());
        self.same.len() - 1
    }

    fn value(&mut self, computation: &Computation, number: usize) -> usize {
        self.add(&computation.shapes[number], &computation.dtypes[number], number)
    }

    /// New values for the inputs of a computation.
    fn taken(&mut self, computation: &Computation) -> Vec<usize> {
        (0..computation.inputs).map(|number| self.value(computation, number)).collect()
    }

    /// A node that passes values on to the last of them.
    fn edge(&mut self, part: Part, place: usize, values: Vec<usize>, times: i64) -> Result<Node> {
        let key = (self.shapes[values[0]].clone(), values.len() - 1);
        let ruled = if let Some(known) = self.edges.get(&key) {
            known.clone()
        } else {
            let rule = rule("identity", &vec![&*key.0; key.1], &[&*key.0], &Attributes::default())?;
            let shapes = vec![key.0.clone(); key.1 + 1];
            let ruled = Arc::new(Ruled { name: String::new(), rule, shapes, feature: None });
            self.edges.entry(key).or_insert(ruled).clone()
        };
        Ok(Node { ruled, way: Way::Edge, values, part, place, times })
    }

    fn push_edge(&mut self, part: Part, place: usize, values: Vec<usize>, times: i64) -> Result<()> {
        let edge = self.edge(part, place, values, times)?;
        self.nodes.push(edge);
        Ok(())
    }

    /// Adds the ops of a computation whose inputs have these numbers; those of its results.
    fn body(
        &mut self,
        computation: &Computation,
        inputs: &[usize],
        times: i64,
        within: Option<usize>,
    ) -> Result<Vec<usize>> {
        let copies = Copies::new(computation);
        let mut found = vec![usize::MAX; copies.originals.len()];
        let own = |flow: &mut Self, number: usize, value| {
            if within.is_none() {
                flow.numbers[copies.originals[number]] = Some(value);
            }
        };
        for (number, value) in inputs.iter().enumerate() {
            found[number] = *value;
            own(self, number, *value);
        }
        for step in &copies.steps {
            let op = &computation.ops[step.op];
            self.places.push((within, step.op));
            let operands = step.operands.iter().map(|operand| found[*operand]).collect();
            let made: Vec<usize> = op.results.iter().map(|result| self.value(computation, *result)).collect();
            self.op(op, operands, &made, times, self.places.len() - 1)?;
            for (number, value) in step.results.iter().zip(made) {
                found[*number] = value;
                own(self, *number, value);
            }
        }
        Ok(copies.outputs.iter().map(|output| found[*output]).collect())
    }

    /// Adds the ops of a body that is computed as often as only the run tells: they are counted once.
    fn inside(&mut self, body: &Computation, taken: &[usize], place: usize, number: usize) -> Result<Vec<usize>> {
        self.places.push((Some(place), number));
        self.body(body, taken, 1, Some(self.places.len() - 1))
    }

    fn op(&mut self, op: &Op, operands: Vec<usize>, results: &[usize], times: i64, place: usize) -> Result<()> {
        match &op.does {
            Does::Constant => self.constants.push(Made { value: results[0], place, operands }),
            Does::Barrier => {
                for (value, result) in operands.iter().zip(results) {
                    self.push_edge(Part::Result, place, vec![*value, *result], times)?;
                }
            }
            Does::Call(body) => {
                let inner = self.taken(body);
                for (value, inner) in operands.iter().zip(&inner) {
                    self.push_edge(Part::Operand, place, vec![*value, *inner], times)?;
                }
                let made = self.body(body, &inner, times, Some(place))?;
                for (value, result) in made.into_iter().zip(results) {
                    self.push_edge(Part::Result, place, vec![value, *result], times)?;
                }
            }
            Does::Loop(body, trips) => self.looped(&[body], Some(*trips), operands, results, times, place)?,
            Does::While([test, body]) => self.looped(&[test, body], None, operands, results, times, place)?,
            Does::Case(branches) => {
                let (mut bounds, mut made) = (vec![self.nodes.len()], Vec::new());
                for (number, branch) in branches.iter().enumerate() {
                    made.push(self.inside(branch, &operands[1..], place, number)?);
                    bounds.push(self.nodes.len());
                }
                self.bodies.push(Bodies { bounds, inner: Vec::new(), trips: None, decides: Some(operands[0]) });
                for (number, result) in results.iter().enumerate() {
                    let values = made.iter().map(|made| made[number]).chain([*result]).collect();
                    self.push_edge(Part::Result, place, values, times)?;
                }
            }
            Does::Constraint(constraint) => {
                let edge = self.edge(Part::Op, place, vec![operands[0], results[0]], times)?;
                self.nodes.push(Node { way: Way::Constraint, ..edge });
                self.constraints.push((results[0], constraint.clone()));
            }
            Does::Rule(ruled) => {
                let (ruled, way) = (ruled.clone(), Way::of(&ruled.name));
                let values = [&operands, results].concat();
                self.nodes.push(Node { ruled, way, values, part: Part::Op, place, times });
            }
        }
        Ok(())
    }

    /// Adds a loop: a body that is computed so many times, or a test and a body, whose inputs have the layouts of its results.
    fn looped(
        &mut self,
        bodies: &[&Arc<Computation>],
        trips: Option<i64>,
        operands: Vec<usize>,
        results: &[usize],
        times: i64,
        place: usize,
    ) -> Result<()> {
        let (mut bounds, mut inner, mut made) = (vec![self.nodes.len()], Vec::new(), Vec::new());
        for (number, body) in bodies.iter().enumerate() {
            let taken = self.taken(body);
            for (value, result) in taken.iter().zip(results) {
                self.same[*value] = *result;
            }
            made.push(match trips {
                Some(trips) => self.body(body, &taken, times.saturating_mul(trips), Some(place))?,
                None => self.inside(body, &taken, place, number)?,
            });
            bounds.push(self.nodes.len());
            inner.extend(taken);
        }
        let last = made.len() - 1;
        let decides = (last > 0).then(|| made[0][0]);
        self.bodies.push(Bodies { bounds, inner, trips, decides });
        for ((value, made), result) in operands.into_iter().zip(&made[last]).zip(results) {
            self.push_edge(Part::Result, place, vec![value, *made, *result], times)?;
        }
        Ok(())
    }

    /// Lets all others that use the operand of a constraint use its result.
    pub(super) fn take_over(&mut self, operand: usize, result: usize) {
        let is_it = |node: &Node| node.way == Way::Constraint && node.values == [operand, result];
        let Some(at) = self.nodes.iter().position(is_it) else { return };
        self.uses = OnceLock::new();
        let constraint = self.nodes.remove(at);
        let made = self.nodes.iter().position(|node| node.way == Way::Edge && node.values.last() == Some(&operand));
        let used = || self.nodes.iter().position(|node| node.values.contains(&operand)).unwrap_or(at);
        let first = made.map_or_else(used, |made| {
            // The edges to the results of one op stay together.
            let own = &self.nodes[made];
            let beside = |node: &&Node| own.part == Part::Result && (node.part, node.place) == (own.part, own.place);
            made + 1 + self.nodes[made + 1..].iter().take_while(beside).count()
        });
        for node in &mut self.nodes[first..] {
            if let Some((_, taken)) = node.values.split_last_mut() {
                taken.iter_mut().filter(|value| **value == operand).for_each(|value| *value = result);
            }
        }
        self.nodes.insert(first, constraint);
        for body in &mut self.bodies {
            let is_before = body.bounds.last().is_some_and(|end| *end <= at);
            for (number, bound) in body.bounds.iter_mut().enumerate() {
                // What is put where bodies begin is before them if it comes from behind them.
                let after = first + usize::from(number > 0 || !is_before);
                if after <= *bound && *bound <= at && first < at {
                    *bound += 1;
                } else if at < *bound && *bound <= first + 1 && at < first {
                    *bound -= 1;
                }
            }
        }
    }
}
