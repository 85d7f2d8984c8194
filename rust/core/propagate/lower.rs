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
    op::{Lowered, Policy},
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
    pub fn node(&self, number: usize) -> &Node {
        let nodes = &self.flow.nodes;
        nodes.get(number).unwrap_or_else(|| &self.flow.outputs[number - nodes.len()])
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

/// For each flow of one computation the layouts of all values by a policy, and how ops compute; or where [`Policy::Explicit`] gives
/// none. `itemsizes` are the bytes of an element of each value.
///
/// With [`Policy::Shardy`] each op computes as Shardy's passes say, otherwise so that the fewest bytes move; what has moved for
/// an op is there for those after it.
///
/// # Errors
/// Those of a layout that does not fit its shape.
pub fn propagate(
    flows: Vec<Flow>,
    itemsizes: &[i64],
    policy: Policy,
) -> Result<std::result::Result<Vec<Propagated>, Disagreement>> {
    let (mut found, mut prices) = (Vec::with_capacity(flows.len()), HashMap::new());
    for flow in flows {
        let layouts = match policy {
            Policy::Explicit => match explicit::layouts(&flow) {
                Ok(layouts) => layouts,
                Err(disagreement) => return Ok(Err(disagreement)),
            },
            Policy::Shardy | Policy::Least => whole::layouts(&flow),
        };
        let lowered = lower(&flow, &layouts, itemsizes, policy, &mut prices)?;
        found.push(Propagated { flow, layouts, lowered });
    }
    Ok(Ok(found))
}

/// The ways in which ops of one rule may compute whose values have the same layouts.
enum Ways {
    /// The only one; none where nothing cuts any value.
    One(Option<Arc<Lowered>>),
    /// Some, at least one, of which that is taken that moves the fewest bytes then.
    Any(Vec<Arc<Lowered>>),
}

/// The way in which each op of a computation whose values have these layouts computes, and the same of its results, which are
/// edges; none where nothing cuts any value of it.
fn lower(
    flow: &Flow,
    layouts: &[Option<Arc<Specs>>],
    itemsizes: &[i64],
    policy: Policy,
    prices: &mut HashMap<Priced, i64>,
) -> Result<Vec<Option<Arc<Lowered>>>> {
    let mut moved = Moved { flow, layouts, itemsizes, there: HashSet::new(), prices };
    let mut known: Map<Box<[usize]>, Ways> = Map::default();
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
        match ways {
            Ways::One(lowered) => Ok(lowered.clone()),
            Ways::Any(ways) => Ok(Some(ways[moved.least(node, ways)?].clone())),
        }
    };
    flow.nodes.iter().chain(&flow.outputs).map(of).collect()
}

/// The ways in which an op may compute whose values have these layouts.
fn ways(flow: &Flow, node: &Node, layouts: &[Option<Arc<Specs>>], policy: Policy) -> Ways {
    let (rule, reshapes) = (&node.ruled.rule, node.way == Way::First);
    let held = |tensor: usize| layouts[node.values[tensor]].as_deref();
    let all = || (0..rule.tensors()).map(held);
    if all().all(is_whole) {
        return Ways::One(None);
    }
    let differs = |tensor: usize, inner: &Specs| {
        let same = held(tensor).map_or_else(|| is_whole(Some(inner)), |own| own == inner);
        (!same).then(|| inner.clone())
    };
    if node.is_edge() {
        // The sources need the layout that the target has.
        let goal = held(rule.operands()).cloned().unwrap_or_else(|| vec![Vec::new(); rule.rank(0)]);
        let local = (0..rule.tensors()).map(|tensor| differs(tensor, &goal)).collect();
        return Ways::One(Some(Arc::new(Lowered::new(rule, goal, local, false))));
    }
    if let Some(cuts) = meet::agreed_dims(rule, all()) {
        let lowered = Lowered::new(rule, cuts, vec![None; rule.tensors()], reshapes);
        if policy == Policy::Shardy || lowered.summed.is_empty() {
            return Ways::One(Some(Arc::new(lowered)));
        }
    }
    let tensors = project::closed(rule, all());
    let reshaped = if reshapes { meet::reshaped(rule, &tensors, &flow.mesh) } else { None };
    let cuts = reshaped.unwrap_or_else(|| meet::meet(rule, &tensors, &flow.shapes_of(node), &flow.mesh));
    let lowered = |cuts: Cuts| {
        let local = |tensor: usize| differs(tensor, &of_cuts(rule, tensor, &cuts));
        let local = (0..rule.tensors()).map(local).collect();
        Arc::new(Lowered::new(rule, cuts, local, reshapes))
    };
    match policy {
        Policy::Shardy => Ways::One(Some(lowered(cuts))),
        Policy::Explicit | Policy::Least => {
            Ways::Any(least::ways(&flow.mesh, rule, &tensors, Some(cuts)).into_iter().map(lowered).collect())
        }
    }
}

/// A shape, the layouts before and after, the axes over which it is summed, and the bytes of an element.
type Priced = (Vec<i64>, Specs, Specs, Vec<SubAxis>, i64);

/// The values that have moved so far, and prices that are known.
struct Moved<'a> {
    flow: &'a Flow,
    layouts: &'a [Option<Arc<Specs>>],
    itemsizes: &'a [i64],
    there: HashSet<(usize, Specs)>,
    prices: &'a mut HashMap<Priced, i64>,
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
            if let Some(inner) = inner {
                self.there.insert((*value, inner.clone()));
            }
        }
        Ok(found)
    }
}
