//! The cuts that an op computes with, where its tensors come with different ones (Shardy's explicit reshards).

use super::{
    axes::{self, Prefix},
    project::Tensor,
};
use crate::{
    factor::rule::{Kind, Rule},
    mesh::Mesh,
    sub_axis::SubAxis,
};

/// The axes of each factor.
pub(crate) type Cuts = Vec<Vec<SubAxis>>;

/// The cuts that all tensors have, if they agree and none cuts what must be whole.
fn agreed(rule: &Rule, tensors: &[Tensor]) -> Option<Cuts> {
    let mut found: Cuts = vec![Vec::new(); rule.factors().len()];
    let mut seen: Vec<SubAxis> = Vec::new();
    for (number, factor) in rule.factors().iter().enumerate() {
        let mut cuts = tensors.iter().filter_map(|cuts| cuts[number].as_ref());
        let Some(first) = cuts.next() else { continue };
        if cuts.any(|cut| cut.axes != first.axes) || axes::any_overlap(&first.axes, &seen) {
            return None;
        }
        if factor.kind == Kind::Whole {
            if !first.axes.is_empty() {
                return None;
            }
            continue;
        }
        seen.extend(&first.axes);
        found[number].clone_from(&first.axes);
    }
    Some(found)
}

/// An offer to cut a factor by some axes.
struct Offer {
    factor: usize,
    axes: Vec<SubAxis>,
    /// The elements of all tensors that are cut so.
    weight: i64,
    /// The shards that it adds.
    shards: i64,
}

/// The cuts that an op computes with; `sizes` are the elements of its tensors.
pub(crate) fn meet(rule: &Rule, tensors: &[Tensor], sizes: &[i64], mesh: &Mesh) -> Cuts {
    if let Some(agreed) = agreed(rule, tensors) {
        return agreed;
    }
    let ranked: Vec<usize> = (0..rule.tensors()).filter(|tensor| rule.rank(*tensor) > 0).collect();
    let whole = rule.factors().iter().any(|factor| factor.kind == Kind::Whole);
    let compound = ranked.iter().any(|&tensor| (0..rule.rank(tensor)).any(|dim| rule.dim(tensor, dim).len() > 1));
    if let [first, second] = ranked[..]
        && !whole
        && !compound
    {
        return of_two(rule, tensors, sizes, [first, second], mesh);
    }
    let mut found = by_weight(rule, tensors, sizes, mesh);
    if whole {
        move_to_batch(rule, &ranked, &mut found);
    }
    found
}

/// The cuts of that one of two tensors that no shift needs, the larger, the one with more shards, the first.
fn of_two(rule: &Rule, tensors: &[Tensor], sizes: &[i64], pair: [usize; 2], mesh: &Mesh) -> Cuts {
    let key = |tensor: usize| {
        let cuts = tensors[tensor].iter().enumerate().filter_map(|(number, cut)| Some((number, cut.as_ref()?)));
        let shifted =
            cuts.clone().any(|(number, cut)| rule.factors()[number].kind == Kind::Shift && !cut.axes.is_empty());
        let shards =
            cuts.fold(1, |n: i64, (_, cut)| n.saturating_mul(axes::shards(&cut.axes) * axes::shards(&cut.overflow)));
        (!shifted, sizes[tensor], shards)
    };
    let [first, second] = if key(pair[0]) >= key(pair[1]) { pair } else { [pair[1], pair[0]] };
    let mut found: Cuts = vec![Vec::new(); rule.factors().len()];
    let mut used: Vec<SubAxis> = Vec::new();
    for (number, cut) in tensors[first].iter().enumerate() {
        if let Some(cut) = cut {
            used.extend(&cut.axes);
            found[number].clone_from(&cut.axes);
        }
    }
    for (number, cut) in tensors[second].iter().enumerate() {
        if let (Some(cut), None) = (cut, &tensors[first][number]) {
            found[number].clone_from(&cut.axes);
            axes::cut_off(&mut found[number], &used, mesh);
        }
    }
    found
}

/// The best offer, again and again: most elements, then by kind, most shards, longer lists, later names.
fn by_weight(rule: &Rule, tensors: &[Tensor], sizes: &[i64], mesh: &Mesh) -> Cuts {
    let factors = rule.factors();
    let mut offers: Vec<Offer> = Vec::new();
    for (number, cut) in tensors.iter().flat_map(|cuts| cuts.iter().enumerate()) {
        let all: &[SubAxis] = cut.as_ref().map_or(&[], |cut| &cut.axes);
        for end in 1..=all.len() {
            let list = &all[..end];
            if !offers.iter().any(|offer| offer.factor == number && offer.axes == list) {
                offers.push(Offer { factor: number, axes: list.to_vec(), weight: 0, shards: axes::shards(list) });
            }
        }
    }
    for (cuts, size) in tensors.iter().zip(sizes) {
        for offer in &mut offers {
            let cut = cuts[offer.factor].as_ref();
            if cut.is_some_and(|cut| axes::prefix(&offer.axes, &cut.axes) != Prefix::Not) {
                offer.weight = offer.weight.saturating_add(*size);
            }
        }
    }
    // A factor of a dim waits for the one before it.
    let mut waits: Vec<Vec<u32>> = vec![Vec::new(); factors.len()];
    for tensor in 0..rule.tensors() {
        for pair in (0..rule.rank(tensor)).flat_map(|dim| rule.dim(tensor, dim).windows(2)) {
            waits[pair[1] as usize].push(pair[0]);
        }
    }
    let rank = |factor: usize| match factors[factor].kind {
        Kind::Pass => 3,
        Kind::Sum => 2,
        Kind::Shift => 1,
        Kind::Whole => 0,
    };
    let mut found: Cuts = vec![Vec::new(); factors.len()];
    loop {
        let free = offers.iter().filter(|offer| waits[offer.factor].is_empty());
        let best = free.max_by(|a, b| {
            let key = |offer: &Offer| (offer.weight, rank(offer.factor), offer.shards, offer.factor);
            key(a).cmp(&key(b)).then_with(|| axes::order(&a.axes, &b.axes, mesh))
        });
        let Some(best) = best else { return found };
        let (taken, list) = (best.factor, best.axes.clone());
        found[taken].clone_from(&list);
        if axes::shards(&list) == factors[taken].size {
            for waiting in &mut waits {
                waiting.retain(|before| *before as usize != taken);
            }
        }
        offers.retain_mut(|offer| {
            if offer.factor == taken {
                let longer = axes::prefix(&list, &offer.axes) == Prefix::Strict;
                offer.shards = axes::shards(&offer.axes) / axes::shards(&list);
                return longer;
            }
            let own = &found[offer.factor];
            let shorter = axes::cut_off(&mut offer.axes, &list, mesh);
            offer.shards = axes::shards(&offer.axes) / axes::shards(own).max(1);
            let is_own = shorter && &offer.axes == own;
            !(is_own || offer.axes.is_empty())
        });
    }
}

/// Cuts of factors that must be whole go to those that pass everywhere, as far as these divide.
fn move_to_batch(rule: &Rule, ranked: &[usize], found: &mut Cuts) {
    let everywhere = |number: usize| {
        let in_tensor = |tensor: usize| {
            (0..rule.rank(tensor)).any(|dim| rule.dim(tensor, dim).iter().any(|factor| *factor as usize == number))
        };
        ranked.iter().all(|tensor| in_tensor(*tensor))
    };
    for number in 0..found.len() {
        if rule.factors()[number].kind != Kind::Whole {
            continue;
        }
        let moved = std::mem::take(&mut found[number]);
        if !everywhere(number) {
            continue;
        }
        let mut moved = moved.into_iter().peekable();
        for (batch, cuts) in found.iter_mut().enumerate() {
            let factor = rule.factors()[batch];
            if factor.kind != Kind::Pass || factor.size == 0 || !everywhere(batch) {
                continue;
            }
            let shards = axes::shards(cuts);
            if factor.size % shards != 0 {
                continue;
            }
            let mut room = factor.size / shards;
            while let Some(axis) = moved.next_if(|axis| room % axis.size == 0) {
                room /= axis.size;
                axes::push(cuts, axis);
            }
        }
    }
}
