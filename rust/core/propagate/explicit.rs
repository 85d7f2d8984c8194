//! The layouts that JAX's explicit mode gives the results of ops, and where it gives none.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{
    axes,
    flow::Flow,
    node::{Node, Part, Way},
    numbered::{Map, Numbered},
    project::{Specs, is_whole},
    reshaped::reshaped,
};
use crate::{
    computation::Ruled,
    factor::{is_elementwise, rule::Kind},
    mesh::Mesh,
    shown,
    sub_axis::SubAxis,
};

/// A disagreement that explicit mode does not decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disagreement {
    /// In words.
    pub why: String,
    /// The operands that disagree, each with the input of the computation that its layout is from, if it is from one.
    pub operands: Vec<(usize, Option<usize>)>,
    /// The number of the op in the computation, then in the body of that op, and so on; empty if the layout of an input or of a
    /// result is at fault, which the one operand is then.
    pub place: Vec<usize>,
}

/// The words, and the operands.
type Conflict = (String, Vec<usize>);

/// The layouts of all values, op by op.
pub(super) fn layouts(flow: &Flow) -> Result<Vec<Option<Arc<Specs>>>, Disagreement> {
    let ends = flow.outputs.iter().enumerate().map(|(number, output)| (number, None, output.values[1]));
    for (number, input, value) in (0..flow.inputs).map(|value| (value, Some(value), value)).chain(ends) {
        if let Some(why) = uneven(flow, value) {
            return Err(Disagreement { why, operands: vec![(number, input)], place: Vec::new() });
        }
    }
    let inner: HashSet<usize> =
        flow.bodies.iter().flat_map(|body| &body.inner).map(|value| flow.same[*value]).collect();
    let of_loops = flow.nodes.iter().filter(|node| node.part == Part::Result && node.values.len() == 3);
    let begins = of_loops.map(|node| (node.values[2], node.values[0])).filter(|(result, _)| inner.contains(result));
    let mut held = Held {
        flow,
        layouts: vec![None; flow.shapes.len()],
        inputs: (0..flow.shapes.len()).map(|value| (value < flow.inputs).then_some(value)).collect(),
        begins: begins.collect(),
        shared: Numbered::default(),
    };
    for (value, start) in flow.starts.iter().enumerate() {
        held.layouts[value] = start.as_ref().map(|start| held.shared.of(Arc::new(start.specs.clone())));
    }
    // The places of loops with a test and of cases: their edges to results come after their bodies.
    let deciding = flow.bodies.iter().filter(|body| body.decides.is_some());
    let edges = deciding.filter_map(|body| flow.nodes.get(body.bounds[body.bounds.len() - 1]));
    let decided: HashSet<usize> = edges.filter(|node| node.part == Part::Result).map(|node| node.place).collect();
    // By the layouts of operands, and the rule.
    let mut known: Map<Box<[usize]>, Vec<u32>> = Map::default();
    let mut key: Vec<usize> = Vec::new();
    for node in flow.nodes.iter().chain(&flow.outputs) {
        let (operands, results) = node.values.split_at(node.ruled.rule.operands());
        if node.part == Part::Result && decided.contains(&node.place) {
            held.alike(node)?;
        }
        if node.is_edge() {
            if let Some(why) = (node.way == Way::Constraint).then(|| uneven(flow, results[0])).flatten() {
                return Err(Disagreement { why, operands: Vec::new(), place: flow.path(node.place) });
            }
            if held.layouts[results[0]].is_none() {
                let (specs, input) = held.of(operands[0]);
                (held.layouts[results[0]], held.inputs[results[0]]) = (Some(specs), input);
            }
            continue;
        }
        key.clear();
        key.extend(operands.iter().map(|value| held.of(*value).0 as usize));
        let cut = key.iter().position(|number| !is_whole(Some(held.specs(*number))));
        let input = cut.and_then(|operand| held.inputs[flow.same[operands[operand]]]);
        key.push(Arc::as_ptr(&node.ruled).addr());
        let found = match known.get(&key[..]) {
            Some(found) => found,
            None => known.entry(key.as_slice().into()).or_insert(held.results(node, &key[..operands.len()])?),
        };
        for (value, specs) in results.iter().zip(found) {
            (held.layouts[*value], held.inputs[*value]) = (Some(*specs), input);
        }
    }
    Ok(flow.same.iter().map(|owner| held.layouts[*owner].map(|number| held.shared.at(number).clone())).collect())
}

/// The words if a value begins with a layout whose devices do not divide a dim.
fn uneven(flow: &Flow, value: usize) -> Option<String> {
    let start = flow.starts[value].as_ref()?;
    let mut dims = flow.shapes[value].iter().zip(&start.specs).enumerate();
    let (dim, (size, axes)) = dims.find(|(_, (size, axes))| *size % axes::shards(axes) != 0)?;
    let (elements, count) = (shown::counted(size, "element", "elements"), axes::shards(axes));
    Some(format!("it cuts dim {dim} of {elements} over {count} devices, which do not divide it"))
}

/// The layouts that are known so far, with the input that each is from.
struct Held<'a> {
    flow: &'a Flow,
    layouts: Vec<Option<u32>>,
    inputs: Vec<Option<usize>>,
    /// For the result of a loop the value that the loop begins with.
    begins: HashMap<usize, usize>,
    /// All layouts, by number.
    shared: Numbered<Arc<Specs>>,
}

impl Held<'_> {
    /// Checks that what bodies give has one layout: that which a loop begins with, or that of the first branch.
    fn alike(&mut self, node: &Node) -> Result<(), Disagreement> {
        let sources = &node.values[..node.ruled.rule.operands()];
        let (first, input) = self.of(sources[0]);
        for (number, source) in sources.iter().enumerate().skip(1) {
            let (specs, other) = self.of(*source);
            let [first, specs] = [first, specs].map(|number| self.shared.at(number));
            if let Some(dim) = (0..specs.len()).find(|dim| specs[*dim] != first[*dim]) {
                let is_loop = self.begins.contains_key(&node.values[sources.len()]);
                let [before, after] = if is_loop {
                    ["the start of the loop", "the end of a trip"]
                } else {
                    ["the end of one branch", "the end of another"]
                };
                let [begun, ended] = [first, specs].map(|specs| how_cut(&specs[dim], &self.flow.mesh));
                let why = format!("dim {dim} of a value is {begun} at {before}, and {ended} at {after}");
                let (operands, place) = (vec![(0, input), (number, other)], self.flow.path(node.place));
                return Err(Disagreement { why, operands, place });
            }
        }
        Ok(())
    }

    /// The layouts of the results of an op whose operands have these, by number.
    fn results(&mut self, node: &Node, operands: &[usize]) -> Result<Vec<u32>, Disagreement> {
        let specs: Vec<&Specs> = operands.iter().map(|number| self.specs(*number)).collect();
        let (ruled, shapes) = (&node.ruled, &self.flow.shapes_of(node));
        let op = Explicit { ruled, mesh: &self.flow.mesh, shapes, specs: &specs };
        let found = op.results().map_err(|(why, mut places)| {
            places.dedup();
            let from = |at: usize| (at, self.inputs[self.flow.same[node.values[at]]]);
            Disagreement { why, operands: places.into_iter().map(from).collect(), place: self.flow.path(node.place) }
        })?;
        Ok(found.into_iter().map(|specs| self.shared.of(Arc::new(specs))).collect())
    }

    /// The number of the layout of a value, and the input that it is from.
    fn of(&mut self, value: usize) -> (u32, Option<usize>) {
        let owner = self.flow.same[value];
        if let Some(known) = self.layouts[owner] {
            return (known, self.inputs[owner]);
        }
        let Some(&first) = self.begins.get(&owner) else {
            let whole = vec![Vec::new(); self.flow.shapes[value].len()];
            return (self.shared.of(Arc::new(whole)), self.inputs[owner]);
        };
        let (found, input) = self.of(first);
        (self.layouts[owner], self.inputs[owner]) = (Some(found), input);
        (found, input)
    }

    fn specs(&self, number: usize) -> &Specs {
        self.shared.at(number as u32)
    }
}

/// The axes of a dim in words.
fn how_cut(axes: &[SubAxis], mesh: &Mesh) -> String {
    let names: Vec<String> = axes.iter().map(|axis| axis.name(mesh)).collect();
    if names.is_empty() { "whole".to_owned() } else { format!("cut over {}", names.join("+")) }
}

/// An op with the layouts of its operands.
struct Explicit<'a> {
    ruled: &'a Ruled,
    mesh: &'a Mesh,
    /// The shapes of operands and results.
    shapes: &'a [&'a [i64]],
    specs: &'a [&'a Specs],
}

impl Explicit<'_> {
    /// The layouts of its results.
    fn results(&self) -> Result<Vec<Specs>, Conflict> {
        let found = self.result()?;
        if let Some((first, dim, axis)) = axes::repeated(&found) {
            let of_operand = |at: usize| {
                let dim = self.specs[at].iter().position(|spec| spec.contains(&axis))?;
                Some((at, format!("dim {dim} of operands[{at}]")))
            };
            let (operands, places): (Vec<usize>, Vec<String>) = (0..self.specs.len()).filter_map(of_operand).unzip();
            let (name, cut) = (axis.name(self.mesh), places.join(" and "));
            return Err((format!("{name} would cut dims {first} and {dim} of the result: it cuts {cut}"), operands));
        }
        let of = |shape: &&[i64]| {
            if shape.len() == found.len() { found.clone() } else { vec![Vec::new(); shape.len()] }
        };
        Ok(self.shapes[self.specs.len()..].iter().map(of).collect())
    }

    fn result(&self) -> Result<Specs, Conflict> {
        let rule = &self.ruled.rule;
        match self.ruled.name.as_str() {
            "select" => self.like(1, [2, 0]),
            "clamp" => self.like(1, []),
            name if is_elementwise(name) => self.met(),
            "transpose" | "broadcast_in_dim" | "reduce" => Ok(self.passed()),
            "reshape" => self.reshaped(),
            "concatenate" | "dynamic_update_slice" => self.like(0, 1..self.specs.len()),
            "reverse" => self.like(0, []),
            "sort" => {
                let along = (0..rule.rank(0)).find(|dim| self.kind(0, *dim) == Kind::Whole);
                for operand in 0..self.specs.len() {
                    along.map_or(Ok(()), |along| self.whole(operand, along))?;
                    self.like(0, [operand])?;
                }
                self.like(0, [])
            }
            "slice" | "pad" | "dynamic_slice" | "reduce_window" | "convolution" => self.windows(),
            "dot_general" => self.product(),
            "gather" => self.gathered(),
            "scatter" => self.scattered(),
            name if !self.specs.iter().all(|specs| is_whole(Some(specs))) => {
                Err((format!("explicit mode has no rule for {name}"), Vec::new()))
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Says how a dim of an operand is cut.
    fn text(&self, operand: usize, dim: usize) -> String {
        format!("dim {dim} of operands[{operand}] is {}", how_cut(&self.specs[operand][dim], self.mesh))
    }

    fn differ(&self, first: (usize, usize), other: (usize, usize)) -> Conflict {
        let why = format!("{}, and {}", self.text(first.0, first.1), self.text(other.0, other.1));
        (why, vec![first.0, other.0])
    }

    /// The axes that several dims of operands have, except for those that are whole.
    fn agreed(&self, places: impl Iterator<Item = (usize, usize)>) -> Result<&[SubAxis], Conflict> {
        let mut first: Option<(usize, usize)> = None;
        for (at, dim) in places.filter(|(at, dim)| !self.specs[*at][*dim].is_empty()) {
            match first {
                Some(first) if self.specs[first.0][first.1] != self.specs[at][dim] => {
                    return Err(self.differ(first, (at, dim)));
                }
                Some(_) => {}
                None => first = Some((at, dim)),
            }
        }
        Ok(first.map_or(&[], |(at, dim)| &self.specs[at][dim]))
    }

    /// The layout of one operand, which others must have too that have dims: numbers of places have none.
    fn like(&self, operand: usize, others: impl IntoIterator<Item = usize>) -> Result<Specs, Conflict> {
        let own = self.specs[operand];
        for other in others.into_iter().filter(|other| !self.specs[*other].is_empty()) {
            if let Some(dim) = (0..own.len()).find(|dim| own[*dim] != self.specs[other][*dim]) {
                return Err(self.differ((operand.min(other), dim), (operand.max(other), dim)));
            }
        }
        Ok(own.clone())
    }

    fn whole(&self, operand: usize, dim: usize) -> Result<(), Conflict> {
        if self.specs[operand][dim].is_empty() {
            return Ok(());
        }
        Err((format!("{}, but {} needs it whole", self.text(operand, dim), self.ruled.name), vec![operand]))
    }

    /// The first factor of a dim, which is its only one except in reshapes and convolutions.
    #[inline]
    fn factor(&self, tensor: usize, dim: usize) -> u32 {
        self.ruled.rule.dim(tensor, dim)[0]
    }

    fn kind(&self, tensor: usize, dim: usize) -> Kind {
        self.ruled.rule.factors()[self.factor(tensor, dim) as usize].kind
    }

    /// The dim of a tensor that is a factor.
    #[inline]
    fn dim(&self, tensor: usize, factor: u32) -> Option<usize> {
        self.ruled.rule.dims(tensor).position(|factors| factors[0] == factor)
    }

    /// The operands that have a factor, and its dim in each.
    fn places(&self, factor: u32) -> impl Iterator<Item = (usize, usize)> {
        (0..self.specs.len()).filter_map(move |at| Some((at, self.dim(at, factor)?)))
    }

    /// The layout of the result whose dims are cut as those of the first operands that have them.
    fn passed(&self) -> Specs {
        let result = self.specs.len();
        let of_dim = |dim| {
            let place = self.places(self.factor(result, dim)).next();
            place.map_or_else(Vec::new, |(at, dim)| self.specs[at][dim].clone())
        };
        (0..self.ruled.rule.rank(result)).map(of_dim).collect()
    }

    /// The layout of the result whose dims are cut as those of all operands that have them and are not whole.
    fn met(&self) -> Result<Specs, Conflict> {
        let result = self.specs.len();
        let of_dim = |dim| Ok(self.agreed(self.places(self.factor(result, dim)))?.to_vec());
        (0..self.ruled.rule.rank(result)).map(of_dim).collect()
    }

    /// A dim of another size in the result must divide; a kernel and what is summed with it must be whole.
    fn windows(&self) -> Result<Specs, Conflict> {
        if let Some(feature) = self.ruled.feature {
            (0..self.specs[1].len()).try_for_each(|dim| self.whole(1, dim))?;
            self.whole(0, feature)?;
        }
        let result = self.shapes[self.specs.len()];
        for (dim, (before, after)) in self.shapes[0].iter().zip(result).enumerate() {
            if before != after && after % axes::shards(&self.specs[0][dim]) != 0 {
                let (held, name) = (self.text(0, dim), &self.ruled.name);
                return Err((
                    format!("{held}, and its shards do not divide the {after} elements that {name} leaves of it"),
                    vec![0],
                ));
            }
        }
        Ok(Specs::clone(self.specs[0]))
    }

    /// A factor is cut as in the first operand that has it; one that is summed may be cut in one operand only.
    fn product(&self) -> Result<Specs, Conflict> {
        let factors = self.ruled.rule.factors();
        let of_kind =
            |kind| (0_u32..).zip(factors).filter(move |(_, factor)| factor.kind == kind).map(|(number, _)| number);
        for factor in of_kind(Kind::Pass).chain(of_kind(Kind::Sum)) {
            self.agreed(self.places(factor))?;
        }
        for factor in of_kind(Kind::Sum) {
            let cut: Vec<_> = self.places(factor).filter(|(at, dim)| !self.specs[*at][*dim].is_empty()).collect();
            if let [first, (other, dim)] = cut[..] {
                let why = format!(
                    "{}, and so is dim {dim} of operands[{other}], and both are summed: the result may be whole, cut or left \
                     as addends",
                    self.text(first.0, first.1)
                );
                return Err((why, vec![first.0, other]));
            }
        }
        Ok(self.passed())
    }

    /// Dims that the first operand does not have must be whole.
    fn apart_is_whole(&self, operand: usize) -> Result<(), Conflict> {
        let apart = |dim: &usize| self.dim(0, self.factor(operand, *dim)).is_none();
        (0..self.specs[operand].len()).filter(apart).try_for_each(|dim| self.whole(operand, dim))
    }

    /// Numbers of rows may be cut only along dims that the operand has as well, and of the operand only what is taken as a whole.
    fn gathered(&self) -> Result<Specs, Conflict> {
        let rule = &self.ruled.rule;
        let found = self.met()?;
        let taken = |dim: &usize| self.kind(0, *dim) == Kind::Pass || self.shapes[0][*dim] == 1;
        (0..rule.rank(0)).filter(|dim| !taken(dim)).try_for_each(|dim| self.whole(0, dim))?;
        self.apart_is_whole(1)?;
        Ok(found)
    }

    /// Updates are cut as the operand is along all dims that both have as a whole; all else is whole.
    fn scattered(&self) -> Result<Specs, Conflict> {
        let mut found = Specs::clone(self.specs[0]);
        for (dim, spec) in found.iter_mut().enumerate() {
            let factor = self.factor(0, dim);
            match (self.dim(1, factor), self.dim(2, factor)) {
                (Some(index), Some(update)) => {
                    *spec = self.agreed([(0, dim), (1, index), (2, update)].into_iter())?.to_vec();
                }
                (None, Some(update)) if self.specs[0][dim] != self.specs[2][update] => {
                    return Err(self.differ((0, dim), (2, update)));
                }
                (_, Some(_)) => {}
                (_, None) => self.whole(0, dim)?,
            }
        }
        self.apart_is_whole(2)?;
        self.apart_is_whole(1)?;
        Ok(found)
    }

    fn reshaped(&self) -> Result<Specs, Conflict> {
        let (specs, after) = (self.specs[0], self.shapes[1]);
        reshaped(self.shapes[0], after, specs).ok_or_else(|| {
            let cut = specs.iter().position(|spec| !spec.is_empty()).unwrap_or(0);
            let (held, after) = (self.text(0, cut), shown::list(after));
            (format!("{held}, and a reshape to {after} does not say what happens to it"), vec![0])
        })
    }
}
