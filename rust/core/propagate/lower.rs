//! A computation op by op: the layouts that each computes with, where they differ from those of its values, and its addends.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{
    explicit::{self, Disagreement},
    flow::Flow,
    least,
    meet::{self, Cuts},
    node::{Node, Part, Way},
    numbered::Map,
    op::{Lowered, Policy, summed},
    project::{self, Specs, is_whole, of_cuts},
    whole,
};
use crate::{error::Result, sub_axis::SubAxis};

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
        let cut = |value: &usize| !is_whole(self.layouts[*value].as_deref());
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

/// The way in which each op of a computation whose values have these layouts computes, and the same of its results, which are
/// edges; none where nothing cuts any value of it.
fn lower(
    flow: &Flow,
    layouts: &[Option<Arc<Specs>>],
    itemsizes: &[i64],
    policy: Policy,
) -> Result<Vec<Option<Arc<Lowered>>>> {
    let mut moved = Moved { flow, layouts, itemsizes, there: HashSet::new(), prices: HashMap::new() };
    let mut known: Map<Box<[usize]>, Vec<Arc<Lowered>>> = Map::default();
    let mut key: Vec<usize> = Vec::new();
    let of = |node: &Node| {
        // Equal layouts of values that agree are one object, and so are the rules of ops that are alike.
        let address = |value: &usize| layouts[*value].as_ref().map_or(0, |specs| Arc::as_ptr(specs).addr());
        key.clear();
        key.extend(node.values.iter().map(address).chain([Arc::as_ptr(&node.ruled).addr()]));
        let ways = match known.get(&key[..]) {
            Some(ways) => ways,
            None => known.entry(key.as_slice().into()).or_insert_with(|| ways(flow, node, layouts, policy)),
        };
        let first = policy == Policy::Shardy || node.is_edge();
        let found = if first || ways.is_empty() { 0 } else { moved.least(node, ways)? };
        Ok(ways.get(found).cloned())
    };
    flow.nodes.iter().chain(&flow.outputs).map(of).collect()
}

/// The ways in which an op may compute whose values have these layouts; none if nothing cuts any of them.
fn ways(flow: &Flow, node: &Node, layouts: &[Option<Arc<Specs>>], policy: Policy) -> Vec<Arc<Lowered>> {
    let (rule, reshapes) = (&node.ruled.rule, node.way == Way::First);
    let held = |tensor: usize| layouts[node.values[tensor]].as_deref();
    let all = || (0..rule.tensors()).map(held);
    if all().all(is_whole) {
        return Vec::new();
    }
    let agreed = meet::agreed_dims(rule, all());
    if let Some(cuts) = agreed.filter(|cuts| policy == Policy::Shardy || summed(rule, cuts).is_empty()) {
        return vec![Arc::new(Lowered::new(rule, cuts, vec![None; rule.tensors()], reshapes))];
    }
    let ways = if node.is_edge() {
        // The sources need the layout that the target has.
        vec![held(rule.operands()).cloned().unwrap_or_else(|| vec![Vec::new(); rule.rank(0)])]
    } else {
        let tensors = project::closed(rule, all());
        let reshaped = if reshapes { meet::reshaped(rule, &tensors, &flow.mesh) } else { None };
        let cuts = reshaped.unwrap_or_else(|| meet::meet(rule, &tensors, &flow.shapes_of(node), &flow.mesh));
        if policy == Policy::Shardy { vec![cuts] } else { least::ways(&flow.mesh, rule, &tensors, Some(cuts)) }
    };
    let lowered = |cuts: Cuts| {
        let local = |tensor: usize| {
            let inner = of_cuts(rule, tensor, &cuts);
            let same = held(tensor).map_or_else(|| is_whole(Some(&inner)), |own| *own == inner);
            (!same).then_some(inner)
        };
        let local = (0..rule.tensors()).map(local).collect();
        Arc::new(Lowered::new(rule, cuts, local, reshapes))
    };
    ways.into_iter().map(lowered).collect()
}

/// A shape, the layouts before and after, the axes over which it is summed, and the bytes of an element.
type Priced = (Vec<i64>, Specs, Specs, Vec<SubAxis>, i64);

/// The values that have moved so far, and prices that are known.
struct Moved<'a> {
    flow: &'a Flow,
    layouts: &'a [Option<Arc<Specs>>],
    itemsizes: &'a [i64],
    there: HashSet<(usize, Specs)>,
    prices: HashMap<Priced, i64>,
}

impl Moved<'_> {
    /// The number of that one of these ways to compute, at least one, which moves the fewest bytes.
    fn least(&mut self, node: &Node, ways: &[Arc<Lowered>]) -> Result<usize> {
        let (flow, operands) = (self.flow, node.ruled.rule.operands());
        let found = least::cheapest(&node.ruled.rule, ways, |way, tensor, summed| {
            let value = node.values[tensor];
            let whole = vec![Vec::new(); flow.shapes[value].len()];
            let outer = self.layouts[value].as_deref().unwrap_or(&whole);
            let inner = ways[way].local[tensor].as_ref().unwrap_or(outer);
            if tensor < operands && self.there.contains(&(value, inner.clone())) {
                return Ok(0);
            }
            let (from, to) = if tensor < operands { (outer, inner) } else { (inner, outer) };
            let (shape, size) = (&*flow.shapes[value], self.itemsizes[value]);
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
            self.there.extend(inner.as_ref().map(|inner| (*value, inner.clone())));
        }
        Ok(found)
    }
}
