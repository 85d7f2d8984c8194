//! The price of a sequence of collectives that somebody else has made.

use std::sync::Arc;

use super::{
    cost::{Links, Step, Tensor},
    kinds::{Collective, Kind, Role, State, all_gather, all_reduce, all_to_all, permute, reduce_scatter, slice},
    search::Sequence,
    views::{Side, Views},
};
use crate::{
    error::{Error, Result},
    layout::Layout,
    partition::Partition,
    shown,
    sub_axis::{Refined, SubAxis},
};

/// A collective, with axes and sub-axes of a mesh by name.
#[derive(Debug, Clone)]
pub struct Given {
    /// The kind of collective.
    pub kind: Kind,
    /// Along which axes or sub-axes, major first as they stand on the dim `to_dim`.
    pub axes: Vec<String>,
    /// The dim that is put together.
    pub from_dim: Option<usize>,
    /// The dim that is cut.
    pub to_dim: Option<usize>,
    /// The layout after the collective, on the same mesh; needed for a permute only.
    pub after: Option<Arc<Layout>>,
}

/// The collectives `given`, one after another from the partition `source` of `mesh` on, with what each costs;
/// `links` has one entry for each axis of the mesh.
///
/// # Errors
/// [`Error::Collective`] if one cannot be made where it stands; names that are no axes or sub-axes of the mesh, or that
/// have no common refinement.
pub fn priced(
    mesh: &Arc<crate::mesh::Mesh>,
    source: &Partition,
    given: &[Given],
    itemsize: i64,
    links: &Links,
) -> Result<Sequence> {
    let named = |number: usize, name: &String| SubAxis::named(mesh, name, || format!("steps[{number}].axes"));
    let mut axes = Vec::with_capacity(given.len());
    for (number, step) in given.iter().enumerate() {
        axes.push(step.axes.iter().map(|name| named(number, name)).collect::<Result<Vec<_>>>()?);
    }
    // The refinement in which the source's sub-axes, those of the steps and those of the layouts after them are axes.
    let layouts = given.iter().filter_map(|step| step.after.as_deref()).chain([&**source.layout()]);
    let mut used: Vec<SubAxis> = axes.iter().flatten().copied().collect();
    for layout in layouts {
        let names = layout.mesh().names().iter();
        used.extend(names.map(|name| SubAxis::named(mesh, name, || "axes".to_owned())).collect::<Result<Vec<_>>>()?);
    }
    let refined = Refined::new(Arc::clone(mesh), used.iter().copied())?.mesh;
    let side = Side { mesh, refined: &refined };
    let views = Views::new(side, side, None).map_err(|obstacle| Error::Collective {
        number: 0,
        kind: "",
        problem: obstacle.to_string(),
    })?;
    let each = |of: &[f64]| views.factors().iter().map(|factor| of[factor.sub_axis.axis]).collect();
    let links = Links { bandwidth: each(&links.bandwidth), latency: each(&links.latency) };
    let tensor = Tensor::new(&views, source.shape(), itemsize, links);
    let state = |layout: &Layout| {
        let (specs, unreduced) = views.of_source(layout);
        State { specs, unreduced }
    };
    let mut before = state(source.layout());
    let mut steps: Vec<Step> = Vec::with_capacity(given.len());
    for (number, (step, axes)) in given.iter().zip(axes).enumerate() {
        let factors: Vec<usize> = axes.into_iter().flat_map(|axis| views.within(axis)).collect();
        let after = step.after.as_deref().map(state);
        let made = made(&tensor, &views, &before, step, &factors, after).and_then(|made| {
            let uneven = tensor.shape.iter().zip(tensor.shards(&made.after)).position(|(n, k)| n % k != 0);
            match uneven {
                Some(dim) => {
                    let elements = shown::counted(&tensor.shape[dim], "element", "elements");
                    Err(format!(
                        "its result has {elements} along dim {dim}, which the shards there do not divide evenly"
                    ))
                }
                None => Ok(made),
            }
        });
        let made = made.map_err(|problem| Error::Collective { number, kind: step.kind.name(), problem })?;
        let previous = std::mem::replace(&mut before, made.after.clone());
        steps.push(tensor.priced(&previous, made));
    }
    Ok(Sequence { views, steps })
}

/// The collective where it stands, or why it cannot be made there.
fn made(
    tensor: &Tensor,
    views: &Views,
    before: &State,
    step: &Given,
    factors: &[usize],
    after: Option<State>,
) -> std::result::Result<Collective, String> {
    let count = tensor.sizes.len();
    let names = |factors: &[usize]| views.names(factors).join(", ");
    let dim = |which: &str, dim: Option<usize>| match dim {
        Some(dim) if dim < before.specs.len() => Ok(dim),
        Some(dim) => Err(format!("{which} is {dim}, outside 0 to {}", before.specs.len() as i64 - 1)),
        None => Err(format!("{which} is missing")),
    };
    let without = |which: &str, dim: Option<usize>| match dim {
        None => Ok(()),
        Some(dim) => Err(format!("{which} is {dim}, but this kind takes none")),
    };
    let all = |role: Role, what: &str| {
        let roles = before.roles(count);
        match factors.iter().find(|&&factor| roles[factor] != role) {
            Some(&factor) => Err(format!("{} {what}", names(&[factor]))),
            None => Ok(()),
        }
    };
    let minor = |from: usize| {
        let spec = &before.specs[from];
        let last = &spec[spec.len().saturating_sub(factors.len())..];
        if last.len() == factors.len() && last.iter().all(|factor| factors.contains(factor)) {
            return Ok(());
        }
        let cut = if spec.is_empty() { "not cut".to_owned() } else { format!("cut by {}", names(spec)) };
        Err(format!("dim {from} is {cut}, and {} are not its minor axes", names(factors)))
    };
    if (1..factors.len()).any(|i| factors[..i].contains(&factors[i])) {
        return Err("an axis is named twice".to_owned());
    }
    let (from, to) = (step.from_dim, step.to_dim);
    if step.kind == Kind::Permute {
        without("from_dim", from).and_then(|()| without("to_dim", to))?;
        let after = after.ok_or("layout is missing")?;
        if after.specs.len() != before.specs.len() || tensor.shards(&after) != tensor.shards(before) {
            return Err("layout has another number of shards along a dim than the layout before".to_owned());
        }
        if after.unreduced != before.unreduced {
            return Err("layout is unreduced over other axes than the layout before".to_owned());
        }
        return Ok(permute(before, after, count));
    }
    let made = match step.kind {
        Kind::Slice => {
            without("from_dim", from)?;
            all(Role::Replicates, "does not replicate")?;
            slice(before, factors, dim("to_dim", to)?)
        }
        Kind::AllGather => {
            without("to_dim", to)?;
            let from = dim("from_dim", from)?;
            minor(from)?;
            all_gather(before, from, factors.len())
        }
        Kind::AllToAll => {
            let (from, to) = (dim("from_dim", from)?, dim("to_dim", to)?);
            if from == to {
                return Err(format!("from_dim and to_dim are both {from}"));
            }
            minor(from)?;
            all_to_all(before, from, to, factors)
        }
        Kind::ReduceScatter => {
            without("from_dim", from)?;
            all(Role::Unreduced, "is not unreduced")?;
            reduce_scatter(before, factors, dim("to_dim", to)?)
        }
        Kind::AllReduce => {
            without("from_dim", from).and_then(|()| without("to_dim", to))?;
            all(Role::Unreduced, "is not unreduced")?;
            all_reduce(before, factors)
        }
        Kind::Permute => unreachable!("made above"),
    };
    match after {
        Some(after) if after != made.after => Err("layout is not the one that this collective leads to".to_owned()),
        _ => Ok(made),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{mesh::Mesh, parallel::never, uneven::Uneven};

    fn given(kind: Kind, axes: &[&str], from_dim: Option<usize>, to_dim: Option<usize>) -> Given {
        Given { kind, axes: axes.iter().map(|&name| name.to_owned()).collect(), from_dim, to_dim, after: None }
    }

    fn setting() -> (Arc<Mesh>, Partition, Links) {
        let mesh = Arc::new(Mesh::new(&["x", "y"], &[2, 4]).unwrap());
        let layout = Layout::new(mesh.clone(), &[&["x", "y"][..], &[]], &[]).unwrap();
        let source = Partition::new(Arc::new(layout), &[64, 64], Uneven::Even).unwrap();
        (mesh, source, Links { bandwidth: vec![1e9; 2], latency: vec![0.0; 2] })
    }

    #[test]
    fn each_is_priced_where_it_stands() {
        let (mesh, source, links) = setting();
        let steps = [
            given(Kind::AllToAll, &["y:(2)2"], Some(0), Some(1)),
            given(Kind::AllGather, &["x", "y:(1)2"], Some(0), None),
            given(Kind::Slice, &["y:(1)2"], None, Some(1)),
        ];
        let found = priced(&mesh, &source, &steps, 4, &links).unwrap();
        // 2,048 bytes each, of which half go; then three more shards of 2,048 bytes; a slice is free.
        assert_eq!(found.steps.iter().map(|step| step.bytes).collect::<Vec<_>>(), [1024, 3 * 2048, 0]);
        assert_eq!(found.views.names(&found.steps[2].collective.after.specs[1]), ["y:(2)2", "y:(1)2"]);
    }

    #[test]
    fn what_cannot_be_made_is_refused_with_its_number() {
        let (mesh, source, links) = setting();
        let cases = [
            (given(Kind::AllGather, &["x"], Some(0), None), "dim 0 is cut by x, y, and x are not its minor axes"),
            (given(Kind::AllGather, &["y"], Some(1), None), "dim 1 is not cut, and y are not its minor axes"),
            (given(Kind::AllGather, &["y"], Some(2), None), "from_dim is 2, outside 0 to 1"),
            (given(Kind::AllGather, &["y"], None, None), "from_dim is missing"),
            (given(Kind::AllGather, &["y"], Some(0), Some(1)), "to_dim is 1, but this kind takes none"),
            (given(Kind::AllToAll, &["y"], Some(0), Some(0)), "from_dim and to_dim are both 0"),
            (given(Kind::AllToAll, &["y", "y"], Some(0), Some(1)), "an axis is named twice"),
            (given(Kind::Slice, &["y"], None, Some(1)), "y does not replicate"),
            (given(Kind::AllReduce, &["y"], None, None), "y is not unreduced"),
            (given(Kind::ReduceScatter, &["y"], None, Some(1)), "y is not unreduced"),
            (given(Kind::Permute, &["x", "y"], None, None), "layout is missing"),
        ];
        for (step, problem) in cases {
            let kind = step.kind.name();
            let steps = [given(Kind::AllToAll, &[], Some(0), Some(1)), step];
            let expected = Error::Collective { number: 1, kind, problem: problem.to_owned() };
            assert_eq!(priced(&mesh, &source, &steps, 4, &links), Err(expected));
        }
        let unknown = given(Kind::AllGather, &["z"], Some(0), None);
        assert!(matches!(priced(&mesh, &source, &[unknown], 4, &links), Err(Error::UnknownAxis { .. })));
    }

    #[test]
    fn a_sequence_that_was_found_costs_what_the_search_says() {
        let (mesh, source, links) = setting();
        let layout = Layout::new(mesh.clone(), &[&["y"][..], &["x"]], &[]).unwrap();
        let destination = Partition::new(Arc::new(layout), &[64, 64], Uneven::Even).unwrap();
        let views = Views::new((&*mesh).into(), (&*mesh).into(), None).unwrap();
        let found =
            super::super::search::sequence(&views, &source, &destination, 4, &links, &mut never).unwrap().unwrap();
        let again: Vec<Given> = found
            .steps
            .iter()
            .map(|Step { collective, .. }| {
                let names = |factors: &Vec<usize>| found.views.names(factors);
                let specs: Vec<Vec<String>> = collective.after.specs.iter().map(names).collect();
                Given {
                    kind: collective.kind,
                    axes: names(&collective.axes),
                    from_dim: collective.from_dim,
                    to_dim: collective.to_dim,
                    after: Some(Arc::new(Layout::new(mesh.clone(), &specs, &[]).unwrap())),
                }
            })
            .collect();
        let given = priced(&mesh, &source, &again, 4, &links).unwrap();
        let prices = |of: &Sequence| of.steps.iter().map(|step| (step.bytes, step.seconds)).collect::<Vec<_>>();
        assert_eq!(prices(&given), prices(&found));
    }
}
