//! The cuts that an op computes with, where its tensors come with different ones (Shardy's explicit reshards).

use super::{
    axes::{self, Prefix},
    project::{self, Specs, Tensor},
};
use crate::{
    factor::rule::{Kind, Rule},
    mesh::Mesh,
    radix,
    sub_axis::SubAxis,
};

/// The axes of each factor.
pub(crate) type Cuts = Vec<Vec<SubAxis>>;

/// The cuts that all tensors have, if they agree and none cuts what must be whole.
pub(crate) fn agreed(rule: &Rule, tensors: &[Tensor]) -> Option<Cuts> {
    let cuts = tensors.iter().flat_map(|cuts| cuts.iter().enumerate());
    agreed_lists(rule, cuts.filter_map(|(number, cut)| Some((number, cut.as_ref()?.axes.as_slice()))))
}

/// The same of tensors with these layouts, by a rule whose dims are one factor each.
pub(crate) fn agreed_dims<'a>(rule: &Rule, tensors: impl Iterator<Item = Option<&'a Specs>>) -> Option<Cuts> {
    let of_tensor = |(tensor, specs): (usize, Option<&'a Specs>)| {
        let axes = move |dim: usize| specs.map_or(&[][..], |specs| &specs[dim]);
        (0..rule.rank(tensor)).map(move |dim| (rule.dim(tensor, dim)[0] as usize, axes(dim)))
    };
    rule.is_plain().then(|| agreed_lists(rule, tensors.enumerate().flat_map(of_tensor)))?
}

/// The same, by the factors that are cut and how, as often as they are in a tensor.
fn agreed_lists<'a>(rule: &Rule, cuts: impl Iterator<Item = (usize, &'a [SubAxis])>) -> Option<Cuts> {
    let mut found: Vec<Option<&[SubAxis]>> = vec![None; rule.factors().len()];
    for (number, list) in cuts {
        if *found[number].get_or_insert(list) != list {
            return None;
        }
    }
    let found: Cuts = found.into_iter().map(|list| list.unwrap_or_default().to_vec()).collect();
    let wrong = |(number, list): (usize, &Vec<SubAxis>)| {
        !list.is_empty()
            && (rule.factors()[number].kind == Kind::Whole
                || found[..number].iter().any(|other| axes::any_overlap(list, other)))
    };
    let agree = !found.iter().enumerate().any(wrong);
    agree.then_some(found)
}

/// The cuts of a reshape with axes that fit no whole factor: those of the side with more shards, dealt out anew to the factors of
/// each side, as far as both then agree. None if all axes fit.
pub(crate) fn reshaped(rule: &Rule, tensors: &[Tensor], mesh: &Mesh) -> Option<Cuts> {
    let fits = |tensor: &Tensor| tensor.iter().flatten().all(|cut| cut.overflow.is_empty());
    if tensors.iter().all(fits) {
        return None;
    }
    let all = |tensor: &Tensor| {
        tensor.iter().flatten().flat_map(|cut| cut.axes.iter().chain(&cut.overflow).copied()).collect::<Vec<_>>()
    };
    let [input, output] = [all(&tensors[0]), all(&tensors[1])];
    let list = if axes::shards(&input) >= axes::shards(&output) { input } else { output };
    let dealt = |tensor: usize| {
        let mut cuts = tensors[tensor].clone();
        deal(rule, tensor, &mut cuts, &list);
        project::project(rule, tensor, Some(&project::layout(rule, tensor, &cuts)), true)
    };
    let [first, second] = [dealt(0), dealt(1)];
    let both = first.iter().zip(&second).map(|pair| match pair {
        (Some(a), Some(b)) => axes::common(&a.axes, &b.axes, mesh),
        (Some(a), None) | (None, Some(a)) => a.axes.clone(),
        (None, None) => Vec::new(),
    });
    Some(both.collect())
}

/// Gives each axis, or parts of it, to the first factors of a tensor that can take them; the last takes what is left.
fn deal(rule: &Rule, tensor: usize, cuts: &mut Tensor, list: &[SubAxis]) {
    let order: Vec<usize> =
        rule.dims(tensor).flatten().map(|factor| *factor as usize).filter(|factor| cuts[*factor].is_some()).collect();
    let mut left: Vec<i64> = order.iter().map(|factor| rule.factors()[*factor].size).collect();
    for cut in cuts.iter_mut().flatten() {
        (cut.axes, cut.overflow) = (Vec::new(), Vec::new());
    }
    let mut rest = list.iter().copied();
    let mut next = rest.next();
    while let Some(mut axis) = next {
        let mut used = false;
        let mut over = true;
        for (at, factor) in order.iter().enumerate() {
            let common = radix::gcd(left[at], axis.size);
            if left[at] <= 1 || common == 1 && axis.size != 1 {
                continue;
            }
            used = true;
            let Some(cut) = &mut cuts[*factor] else { continue };
            axes::push(&mut cut.axes, SubAxis { size: common, ..axis });
            left[at] /= common;
            if axis.size == common {
                over = false;
                break;
            }
            axis = SubAxis { before: axis.before * common, size: axis.size / common, ..axis };
        }
        if !used {
            if let Some(cut) = order.last().and_then(|factor| cuts[*factor].as_mut()) {
                for axis in std::iter::once(axis).chain(rest) {
                    axes::push(&mut cut.overflow, axis);
                }
            }
            return;
        }
        next = if over { Some(axis) } else { rest.next() };
    }
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

/// The cuts that an op computes with whose tensors have these shapes.
pub(crate) fn meet(rule: &Rule, tensors: &[Tensor], shapes: &[&[i64]], mesh: &Mesh) -> Cuts {
    if let Some(agreed) = agreed(rule, tensors) {
        return agreed;
    }
    let elements = |shape: &&[i64]| shape.iter().fold(1_i64, |n, size| n.saturating_mul(*size));
    let sizes: Vec<i64> = shapes.iter().map(elements).collect();
    let ranked: Vec<usize> = (0..rule.tensors()).filter(|tensor| rule.rank(*tensor) > 0).collect();
    let whole = rule.factors().iter().any(|factor| factor.kind == Kind::Whole);
    if let [first, second] = ranked[..]
        && !whole
        && rule.is_plain()
    {
        return of_two(rule, tensors, &sizes, [first, second], mesh);
    }
    let mut found = by_weight(rule, tensors, &sizes, mesh);
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
            // A part of an axis begins it.
            if cut.is_some_and(|cut| axes::prefix(&offer.axes, &cut.axes) != Prefix::Not) {
                offer.weight = offer.weight.saturating_add(*size);
            }
        }
    }
    // A factor of a dim waits for the one before it.
    let mut waits: Vec<Vec<u32>> = vec![Vec::new(); factors.len()];
    for tensor in 0..rule.tensors() {
        for pair in rule.dims(tensor).flat_map(|dim| dim.windows(2)) {
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
            // What is not shortened counts as a whole again, as in Shardy, though some of it is there already.
            let there = if shorter { axes::shards(own).max(1) } else { 1 };
            offer.shards = axes::shards(&offer.axes) / there;
            let is_own = shorter && &offer.axes == own;
            !(is_own || offer.axes.is_empty())
        });
    }
}

/// Cuts of factors that must be whole go to those that pass everywhere, as far as these divide.
fn move_to_batch(rule: &Rule, ranked: &[usize], found: &mut Cuts) {
    let everywhere = |number: usize| ranked.iter().all(|tensor| rule.has(*tensor, number));
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
