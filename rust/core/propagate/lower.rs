//! A computation op by op: the layouts that each computes with, where they differ from those of its values, and its addends.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{
    axes,
    explicit::{self, Disagreement},
    flow::Flow,
    least, meet,
    node::{Node, Part, Way},
    numbered::Map,
    op::{Policy, Settled, of_cuts},
    project::{self, Specs, Tensor},
    whole::{self, is_whole},
};
use crate::{
    error::Result,
    factor::rule::{Kind, Rule},
    sub_axis::SubAxis,
};

/// The layouts and cuts with which an op computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lowered {
    /// The axes that cut each factor while it computes.
    pub cuts: Vec<Vec<SubAxis>>,
    /// The layout of each operand and result while it computes, where it is another than its value has.
    pub local: Vec<Option<Specs>>,
    /// The axes over which its results are addends then.
    pub summed: Vec<SubAxis>,
    /// For a reshape the layouts with which a device can compute, where they are not those: without the cuts of what only one
    /// side has.
    pub possible: Vec<Option<Specs>>,
}

/// The layouts of all values of a computation, and how its ops compute.
#[derive(Debug)]
pub struct Propagated {
    /// The computation.
    pub flow: Flow,
    /// The layout of each value, none where nothing cuts it.
    pub layouts: Vec<Option<Arc<Specs>>>,
    /// The same of each op, then of each edge to a result: none where nothing cuts any value of it.
    pub lowered: Vec<Option<Arc<Lowered>>>,
}

/// The ops whose devices may read rows that their neighbours have.
const SHIFTING: [&str; 9] =
    ["concatenate", "convolution", "eigh", "pad", "reduce_window", "reverse", "select_and_scatter", "slice", "top_k"];

impl Propagated {
    /// An op or an edge.
    #[must_use]
    pub fn node(&self, number: usize) -> Option<&Node> {
        self.flow.nodes.get(number).or_else(|| self.flow.outputs.get(number - self.flow.nodes.len()))
    }

    /// The ops and edges for which something moves, or may.
    pub fn moving(&self) -> impl Iterator<Item = usize> {
        let cut =
            |value: &usize| self.layouts[*value].as_ref().is_some_and(|specs| specs.iter().any(|dim| !dim.is_empty()));
        let nodes = self.flow.nodes.iter().chain(&self.flow.outputs).zip(&self.lowered).enumerate();
        nodes.filter_map(move |(number, (node, lowered))| {
            let lowered = lowered.as_ref()?;
            let moves =
                !lowered.summed.is_empty() || lowered.local.iter().chain(&lowered.possible).any(Option::is_some);
            let shifts = || node.part == Part::Op && SHIFTING.contains(&node.ruled.name.as_str());
            (moves || shifts() && node.values.iter().any(cut)).then_some(number)
        })
    }
}

/// The layouts of all values by a policy, and how ops compute; or where [`Policy::Explicit`] gives none. `itemsizes` are the bytes
/// of an element of each value.
///
/// With [`Policy::Shardy`] each op computes as Shardy's passes say, otherwise so that the fewest bytes move; what has moved for
/// an op is there for those after it.
///
/// # Errors
/// Those of a layout that does not fit its shape.
pub fn propagate(
    flow: Flow,
    itemsizes: &[i64],
    policy: Policy,
) -> Result<std::result::Result<Propagated, Disagreement>> {
    let layouts = match policy {
        Policy::Explicit => match explicit::layouts(&flow) {
            Ok(layouts) => layouts,
            Err(disagreement) => return Ok(Err(disagreement)),
        },
        Policy::Shardy | Policy::Least => whole::layouts(&flow),
    };
    let lowered = lower(&flow, &layouts, itemsizes, policy)?;
    Ok(Ok(Propagated { flow, layouts, lowered }))
}

/// The result for ops of one rule whose values have the same layouts.
enum Known {
    /// The way in which they compute.
    As(Option<Arc<Lowered>>),
    /// The ways in which they may, at least one, of which that is taken that moves the fewest bytes then.
    Any(Vec<Settled>, Vec<Arc<Lowered>>),
}

/// The way in which each op of a computation whose values have these layouts computes, and the same of its results, which are
/// edges; none where nothing cuts any value of it.
fn lower(
    flow: &Flow,
    layouts: &[Option<Arc<Specs>>],
    itemsizes: &[i64],
    policy: Policy,
) -> Result<Vec<Option<Arc<Lowered>>>> {
    let mut moved = Moved::default();
    let mut known: Map<Box<[usize]>, Known> = Map::default();
    let mut key: Vec<usize> = Vec::new();
    let of = |node: &Node| {
        // Equal layouts of values that agree are one object, and so are the rules of ops that are alike.
        let address = |value: &usize| layouts[*value].as_ref().map_or(0, |specs| Arc::as_ptr(specs).addr());
        key.clear();
        key.extend(node.values.iter().map(address).chain([Arc::as_ptr(&node.ruled).addr()]));
        let found = match known.get(&key[..]) {
            Some(found) => found,
            None => known.entry(key.as_slice().into()).or_insert_with(|| settled(flow, node, layouts, policy)),
        };
        match found {
            Known::As(lowered) => Ok(lowered.clone()),
            Known::Any(ways, lowered) => Ok(Some(lowered[moved.least(flow, node, ways, itemsizes)?].clone())),
        }
    };
    flow.nodes.iter().chain(&flow.outputs).map(of).collect()
}

fn settled(flow: &Flow, node: &Node, layouts: &[Option<Arc<Specs>>], policy: Policy) -> Known {
    let specs = || node.values.iter().map(|value| layouts[*value].as_deref());
    if specs().all(is_whole) {
        return Known::As(None);
    }
    if matches!(node.way, Way::Edge | Way::Constraint) {
        return Known::As(Some(Arc::new(edge(node, layouts))));
    }
    let rule = &node.ruled.rule;
    let stays = |cuts| Known::As(Some(Arc::new(lowered(node, cuts, vec![None; rule.tensors()]))));
    if let Some(cuts) = meet::agreed_dims(rule, specs())
        && (policy == Policy::Shardy || !sums(rule, &cuts))
    {
        return stays(cuts);
    }
    let tensors = projected(node, layouts);
    match meet::agreed(rule, &tensors).filter(|cuts| keeps(node, layouts, &tensors, cuts, policy)) {
        Some(cuts) => stays(cuts),
        None if policy == Policy::Shardy => {
            Known::As(Some(Arc::new(shardy(node, layouts, &tensors, meets(flow, node, &tensors)))))
        }
        None => {
            let ways = any(flow, node, layouts, meets(flow, node, &tensors));
            let differs = |(outer, inner): (&Specs, &Specs)| (outer != inner).then(|| inner.clone());
            let local = |way: &Settled| way.layouts.iter().zip(&way.local).map(differs).collect();
            let how = ways.iter().map(|way| Arc::new(lowered(node, way.cuts.clone(), local(way)))).collect();
            Known::Any(ways, how)
        }
    }
}

/// Says whether a factor that is summed is cut.
fn sums(rule: &Rule, cuts: &meet::Cuts) -> bool {
    rule.factors().iter().zip(cuts).any(|(factor, cut)| factor.kind == Kind::Sum && !cut.is_empty())
}

/// Says whether an op computes with these cuts, on which its tensors agree, so that none of them moves.
fn keeps(node: &Node, layouts: &[Option<Arc<Specs>>], tensors: &[Tensor], cuts: &meet::Cuts, policy: Policy) -> bool {
    let rule = &node.ruled.rule;
    if tensors.iter().flatten().flatten().any(|cut| !cut.overflow.is_empty()) {
        return false;
    }
    if policy == Policy::Shardy {
        return true;
    }
    let same = |(tensor, value): (usize, &usize)| {
        let inner = of_cuts(rule, tensor, cuts);
        layouts[*value].as_deref().map_or_else(|| inner.iter().all(Vec::is_empty), |own| *own == inner)
    };
    let mut pieces = cuts.clone();
    project::in_one_piece(rule, &mut pieces);
    !sums(rule, cuts) && pieces == *cuts && node.values.iter().enumerate().all(same)
}

/// The cut of each factor in each tensor of an op.
fn projected(node: &Node, layouts: &[Option<Arc<Specs>>]) -> Vec<Tensor> {
    let of =
        |(tensor, value): (usize, &usize)| project::project(&node.ruled.rule, tensor, layouts[*value].as_deref(), true);
    node.values.iter().enumerate().map(of).collect()
}

fn meets(flow: &Flow, node: &Node, tensors: &[Tensor]) -> meet::Cuts {
    if node.way == Way::First
        && let Some(cuts) = meet::reshaped(&node.ruled.rule, tensors, &flow.mesh)
    {
        return cuts;
    }
    let elements = |value: &usize| flow.shapes[*value].iter().fold(1_i64, |n, size| n.saturating_mul(*size));
    let sizes: Vec<i64> = node.values.iter().map(elements).collect();
    meet::meet(&node.ruled.rule, tensors, &sizes, &flow.mesh)
}

fn shardy(node: &Node, layouts: &[Option<Arc<Specs>>], tensors: &[Tensor], cuts: meet::Cuts) -> Lowered {
    let over = |tensor: &Tensor| tensor.iter().flatten().any(|cut| !cut.overflow.is_empty());
    let dealt = node.way == Way::First && tensors.iter().any(over);
    let differs = |tensor: &Tensor| {
        let cut = |(number, cut): (usize, &Option<project::Cut>)| {
            cut.as_ref().is_some_and(|cut| cut.axes != cuts[number] || !cut.overflow.is_empty())
        };
        tensor.iter().enumerate().any(cut)
    };
    let of = |(tensor, cut): (usize, &Tensor)| {
        let inner = of_cuts(&node.ruled.rule, tensor, &cuts);
        let held = layouts[node.values[tensor]].as_deref();
        let same = held.map_or_else(|| inner.iter().all(Vec::is_empty), |own| *own == inner);
        let moves = if dealt { !same } else { differs(cut) };
        moves.then_some(inner)
    };
    let local = tensors.iter().enumerate().map(of).collect();
    lowered(node, cuts, local)
}

fn lowered(node: &Node, cuts: meet::Cuts, local: Vec<Option<Specs>>) -> Lowered {
    let summed = node.ruled.rule.factors().iter().zip(&cuts).filter(|(factor, _)| factor.kind == Kind::Sum);
    let summed = axes::sorted(summed.flat_map(|(_, axes)| axes.iter().copied()).collect());
    // A reshape or a transpose.
    let possible =
        if node.way == Way::First { possible(&node.ruled.rule, &cuts) } else { vec![None; node.values.len()] };
    Lowered { cuts, local, summed, possible }
}

/// The layouts of a reshape without the cuts of factors that only one side has, or that do not divide and are not alone in
/// their dims, and of what comes after them, or after a factor that is not cut, in a dim of either side.
fn possible(rule: &Rule, cuts: &[Vec<SubAxis>]) -> Vec<Option<Specs>> {
    let count = rule.tensors();
    let dims = |tensor: usize| (0..rule.rank(tensor)).map(move |dim| rule.dim(tensor, dim));
    let in_both = |factor: usize| (0..2).all(|tensor| dims(tensor).flatten().any(|other| *other as usize == factor));
    let alone = |factor: usize| {
        let has = |dim: &&[u32]| dim.iter().any(|other| *other as usize == factor);
        (0..2).flat_map(dims).filter(has).all(|dim| dim.len() == 1)
    };
    let mut kept = cuts.to_vec();
    for (factor, cut) in kept.iter_mut().enumerate() {
        let divides = cut
            .iter()
            .try_fold(rule.factors()[factor].size, |left, part| (left % part.size == 0).then_some(left / part.size));
        if !cut.is_empty() && (!in_both(factor) || (divides.is_none() && !alone(factor))) {
            cut.clear();
        }
    }
    project::in_one_piece(rule, &mut kept);
    if kept == cuts {
        return vec![None; count];
    }
    (0..count)
        .map(|tensor| {
            let layout = of_cuts(rule, tensor, &kept);
            (layout != of_cuts(rule, tensor, cuts)).then_some(layout)
        })
        .collect()
}

/// A shape, the layouts before and after, the axes over which it is summed, and the bytes of an element.
type Priced = (Vec<i64>, Specs, Specs, Vec<SubAxis>, i64);

/// The values that have moved so far, and prices that are known.
#[derive(Default)]
struct Moved {
    there: HashSet<(usize, Specs)>,
    prices: HashMap<Priced, i64>,
}

impl Moved {
    /// The number of that one of these ways to compute which moves the fewest bytes.
    fn least(&mut self, flow: &Flow, node: &Node, ways: &[Settled], itemsizes: &[i64]) -> Result<usize> {
        let (rule, operands) = (&node.ruled.rule, node.ruled.rule.operands());
        let found = least::cheapest(rule, ways, |tensor, outer, inner, summed| {
            let value = node.values[tensor];
            if tensor < operands && self.there.contains(&(value, inner.clone())) {
                return Ok(0);
            }
            let (from, to) = if tensor < operands { (outer, inner) } else { (inner, outer) };
            let (shape, size) = (&*flow.shapes[value], itemsizes[value]);
            let key = (shape.to_vec(), from.clone(), to.clone(), summed.to_vec(), size);
            if let Some(price) = self.prices.get(&key) {
                return Ok(*price);
            }
            let price = least::price(&flow.mesh, shape, from, to, summed, size)?;
            self.prices.insert(key, price);
            Ok(price)
        })?;
        let found = found.unwrap_or(0);
        for (value, inner) in node.values[..operands].iter().zip(&ways[found].local) {
            self.there.insert((*value, inner.clone()));
        }
        Ok(found)
    }
}

/// The ways in which an op may compute whose tensors disagree: of the orders of tensors, and with these cuts.
fn any(flow: &Flow, node: &Node, layouts: &[Option<Arc<Specs>>], cuts: meet::Cuts) -> Vec<Settled> {
    let held = |value: &usize| {
        Some(layouts[*value].as_deref().cloned().unwrap_or_else(|| vec![Vec::new(); flow.shapes[*value].len()]))
    };
    let layouts: Vec<_> = node.values.iter().map(held).collect();
    least::ways(&flow.mesh, &node.ruled.rule, &layouts, &[], Some(cuts))
}

/// An edge: its sources need the layout that its target has.
fn edge(node: &Node, layouts: &[Option<Arc<Specs>>]) -> Lowered {
    let sources = node.ruled.rule.operands();
    let whole = vec![Vec::new(); node.ruled.rule.rank(0)];
    let layout = |value: usize| layouts[value].as_deref().unwrap_or(&whole);
    let goal = layout(node.values[sources]);
    let local: Vec<_> = node.values.iter().map(|value| (layout(*value) != goal).then(|| goal.clone())).collect();
    Lowered { cuts: goal.clone(), possible: vec![None; local.len()], local, summed: Vec::new() }
}
