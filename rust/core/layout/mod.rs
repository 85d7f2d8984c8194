//! A layout: for each tensor dim, the mesh axes that cut it (rule 2.2).

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    mesh::Mesh,
    radix,
    sections::{DimSpec, Factor, Pad, PartSpec},
    sub_axis::{Refined, SubAxis},
    uneven::Uneven,
};

/// The part that a mesh axis has in a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AxisRole {
    /// The axis cuts `dim`; one step along it is `weight` steps of the shard index there.
    Cuts {
        /// The tensor dim.
        dim: usize,
        /// The product of the sizes of the axes after it in the dim's spec.
        weight: i64,
    },
    /// The devices along it hold the same values.
    Replicates,
    /// The devices along it hold partial sums, still to be reduced.
    Unreduced,
}

/// One spec per tensor dim, over a mesh.
///
/// Where specs name sub-axes, the mesh of the layout is the given one with these axes factored: see
/// [`sub_axis`](crate::sub_axis). Device indices are the same in both.
///
/// ```
/// use shardwise_core::{layout::Layout, mesh::Mesh};
/// use std::sync::Arc;
/// let mesh = Arc::new(Mesh::new(&["x", "y", "z"], &[2, 3, 4])?);
/// let layout = Layout::new(mesh, &[&[][..], &["z", "x"]], &[])?;
/// assert_eq!(layout.num_shards(), [1, 8]);
/// assert_eq!(layout.replicated_axes(), [1]);
/// # Ok::<(), shardwise_core::error::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh: Arc<Mesh>,
    specs: Vec<Vec<usize>>,
    roles: Vec<AxisRole>,
    /// For each dim, the sizes of the axes that cut it: with what follows, all that a partition needs of a layout.
    axis_sizes: Vec<Vec<i64>>,
    num_shards: Vec<i64>,
    shard_strides: Vec<i64>,
    total_shards: i64,
    /// The parts of packed dims; empty if there are none.
    parts: Vec<Option<Vec<LayoutPart>>>,
}

/// The cut of one part of a packed dim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayoutPart {
    /// The factors, major first.
    pub factors: Vec<Factor>,
    /// The position of the factor that is cut.
    pub cut: Option<usize>,
    /// The positions of the mesh axes that cut it, major first.
    pub axes: Vec<usize>,
    /// The sizes of the axes as they were named, which may be several of the mesh's together.
    pub sizes: Vec<i64>,
    /// The rule where it does not divide; none is the partition's.
    pub uneven: Option<Uneven>,
    /// True if elements of the factor are cut where there are more shards than elements.
    pub split: bool,
    /// The number of elements of the cut factor that stay together.
    pub unit: i64,
    /// Padding.
    pub pad: Option<Pad>,
    claimed: Vec<SubAxis>,
}

impl LayoutPart {
    fn new<S>(spec: &PartSpec<S>, claimed: Vec<SubAxis>) -> Self {
        Self {
            factors: spec.factors.clone(),
            cut: spec.cut,
            axes: Vec::new(),
            sizes: claimed.iter().map(|sub| sub.size).collect(),
            uneven: spec.uneven,
            split: spec.split,
            unit: spec.unit.unwrap_or(1),
            pad: spec.pad,
            claimed,
        }
    }
}

/// One dim of a layout to be.
#[derive(Clone, Copy)]
enum Dim<'a, S> {
    Axes(&'a [S]),
    Parts(&'a [PartSpec<S>]),
}

/// The leading sub-axes of `claimed` that have `most` coordinates, or all of them if they have fewer.
fn leading(mut claimed: Vec<SubAxis>, most: i64, dim: usize, part: usize) -> Result<Vec<SubAxis>> {
    if claimed.iter().map(|sub| sub.size).product::<i64>() <= most {
        return Ok(claimed);
    }
    let mut rest = most;
    for (kept, sub) in claimed.iter_mut().enumerate() {
        if rest % sub.size == 0 {
            rest /= sub.size;
        } else if sub.size % rest == 0 {
            sub.size = rest;
            claimed.truncate(kept + 1);
            return Ok(claimed);
        } else {
            // Shards of neighbouring devices, but along no sub-axes.
            let sizes: Vec<_> = claimed.iter().map(|sub| sub.size.to_string()).collect();
            let why = match (sizes.as_slice(), sizes[kept].as_str()) {
                ([one], _) => format!("by {one} devices, and neither divides the other"),
                (all, one) => format!(
                    "by axes of {} devices, major first; {rest} are left for the axis of {one}, and neither divides the \
                     other",
                    all.join(" × "),
                ),
            };
            return Err(Error::Part { dim, part, why: format!("is to be cut into at most {most} shards {why}") });
        }
    }
    Ok(claimed)
}

impl Layout {
    /// The layout whose dim `i` is cut by the axes `specs[i]`, first axis major, with partial sums over `unreduced`.
    ///
    /// # Errors
    /// [`Error::UnknownAxis`] for a name that the mesh has not, [`Error::RepeatedAxis`] for one used twice,
    /// [`Error::SubAxisSize`], [`Error::OverlappingAxes`] or [`Error::SubAxesClash`] for sub-axes that do not fit.
    pub fn new<S: AsRef<str>, D: AsRef<[S]>>(mesh: Arc<Mesh>, specs: &[D], unreduced: &[S]) -> Result<Self> {
        Self::of_dims(mesh, specs.iter().map(|spec| Dim::Axes(spec.as_ref())), unreduced)
    }

    /// The layout of `dims`, some of which may be packed, with partial sums over `unreduced`.
    ///
    /// The axes of a packed dim are those of its parts, in the order in which they are first named.
    ///
    /// # Errors
    /// As [`Layout::new`]; [`Error::Parts`] or [`Error::Part`] for parts that cannot be.
    pub fn packed<S: AsRef<str>>(mesh: Arc<Mesh>, dims: &[DimSpec<S>], unreduced: &[S]) -> Result<Self> {
        for (dim, spec) in dims.iter().enumerate() {
            spec.check(dim)?;
        }
        let dims = dims.iter().map(|dim| match dim {
            DimSpec::Axes(axes) => Dim::Axes(axes),
            DimSpec::Parts(parts) => Dim::Parts(parts),
        });
        Self::of_dims(mesh, dims, unreduced)
    }

    fn of_dims<'a, S: AsRef<str> + 'a>(
        mesh: Arc<Mesh>,
        dims: impl ExactSizeIterator<Item = Dim<'a, S>> + Clone,
        unreduced: &'a [S],
    ) -> Result<Self> {
        let rank = dims.len();
        let mut used = Used::new(&mesh);
        // The claims of each dim, or of each of its parts, as positions among all claims.
        let mut spans: Vec<Vec<SubAxis>> = Vec::with_capacity(rank);
        let mut parts: Vec<Option<Vec<LayoutPart>>> = Vec::new();
        for (dim, spec) in dims.enumerate() {
            match spec {
                Dim::Axes(names) => {
                    let claimed = names.iter().map(|name| used.claim(&mesh, name.as_ref(), Place::Dim(dim), 0));
                    spans.push(claimed.collect::<Result<_>>()?);
                }
                Dim::Parts(specs) => {
                    parts.resize_with(rank, || None);
                    let mut all = Vec::new();
                    let mut made = Vec::with_capacity(specs.len());
                    for (number, spec) in specs.iter().enumerate() {
                        let turn = number + 1;
                        let mut claimed = Vec::with_capacity(spec.axes.len());
                        for name in &spec.axes {
                            claimed.push(used.claim(&mesh, name.as_ref(), Place::Dim(dim), turn)?);
                        }
                        if let Some(most) = spec.at_most {
                            claimed = leading(claimed, most, dim, number)?;
                        }
                        all.extend_from_slice(&claimed);
                        made.push(LayoutPart::new(spec, claimed));
                    }
                    parts[dim] = Some(made);
                    spans.push(all);
                }
            }
        }
        let unreduced = unreduced.iter().map(|name| used.claim(&mesh, name.as_ref(), Place::Unreduced, 0));
        let unreduced: Vec<SubAxis> = unreduced.collect::<Result<_>>()?;
        let refined = Refined::new(mesh, spans.iter().flatten().chain(&unreduced).copied())?;
        let mesh = refined.mesh.clone();
        let mut roles = vec![AxisRole::Replicates; mesh.names().len()];
        let mut num_shards = vec![1; rank];
        let mut positions = vec![Vec::new(); rank];
        for sub in unreduced {
            refined.axes_of(sub).for_each(|axis| roles[axis] = AxisRole::Unreduced);
        }
        for (dim, subs) in spans.into_iter().enumerate() {
            for axis in subs.into_iter().flat_map(|sub| refined.axes_of(sub)) {
                if !matches!(roles[axis], AxisRole::Cuts { .. }) {
                    roles[axis] = AxisRole::Cuts { dim, weight: 0 };
                    positions[dim].push(axis);
                }
            }
            // From minor to major, so that each axis's weight is the product of what has gone before.
            for &axis in positions[dim].iter().rev() {
                roles[axis] = AxisRole::Cuts { dim, weight: num_shards[dim] };
                // At most the size of the mesh: each axis cuts once.
                num_shards[dim] *= mesh.sizes()[axis];
            }
        }
        for part in parts.iter_mut().flatten().flatten() {
            part.axes = part.claimed.iter().flat_map(|&sub| refined.axes_of(sub)).collect();
        }
        let axis_sizes = positions.iter().map(|spec| spec.iter().map(|&axis| mesh.sizes()[axis]).collect()).collect();
        let shard_strides = radix::strides(&num_shards);
        // At most the number of devices.
        let total_shards = num_shards.iter().product();
        Ok(Self { mesh, specs: positions, roles, axis_sizes, num_shards, shard_strides, total_shards, parts })
    }

    /// The parts of a packed dim; none for a dim that is not.
    #[must_use]
    pub fn parts(&self, dim: usize) -> Option<&[LayoutPart]> {
        self.parts.get(dim)?.as_deref()
    }

    /// True if a dim is packed.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        !self.parts.is_empty()
    }

    /// The mesh, whose axes are factored where specs name sub-axes.
    #[must_use]
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The number of tensor dims.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.specs.len()
    }

    /// For each dim, the positions of the mesh axes that cut it, major first.
    #[must_use]
    pub fn specs(&self) -> &[Vec<usize>] {
        &self.specs
    }

    /// For each mesh axis, what it does here.
    #[must_use]
    pub fn roles(&self) -> &[AxisRole] {
        &self.roles
    }

    /// For each dim, into how many shards it is cut.
    #[must_use]
    pub fn num_shards(&self) -> &[i64] {
        &self.num_shards
    }

    /// The row-major strides of the shard id.
    #[must_use]
    pub fn shard_strides(&self) -> &[i64] {
        &self.shard_strides
    }

    /// The number of different shards.
    #[must_use]
    pub fn total_shards(&self) -> i64 {
        self.total_shards
    }

    /// For each dim, the sizes of the mesh axes that cut it, major first.
    pub(crate) fn axis_sizes(&self) -> &[Vec<i64>] {
        &self.axis_sizes
    }

    /// The positions of the mesh axes that replicate.
    #[must_use]
    pub fn replicated_axes(&self) -> Vec<usize> {
        self.axes_with(AxisRole::Replicates)
    }

    /// The positions of the mesh axes over which the values are partial sums.
    #[must_use]
    pub fn unreduced_axes(&self) -> Vec<usize> {
        self.axes_with(AxisRole::Unreduced)
    }

    fn axes_with(&self, role: AxisRole) -> Vec<usize> {
        (0..self.roles.len()).filter(|&axis| self.roles[axis] == role).collect()
    }
}

/// The place in the arguments that names an axis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Dim(usize),
    Unreduced,
}

impl Place {
    /// The place; parts count from 1, and 0 is a dim that is not packed.
    fn text(self, turn: usize) -> String {
        match self {
            Self::Dim(dim) if turn == 0 => format!("axes[{dim}]"),
            Self::Dim(dim) => format!("axes[{dim}], part {}", turn - 1),
            Self::Unreduced => "unreduced".to_owned(),
        }
    }
}

/// A use of an axis or a sub-axis.
struct Claim<'a> {
    sub: SubAxis,
    name: &'a str,
    place: Place,
    /// The latest part of the place that uses it.
    turn: usize,
    /// The claim before it of the same axis.
    previous: Option<usize>,
}

/// All uses, in order.
struct Used<'a> {
    claims: Vec<Claim<'a>>,
    /// For each mesh axis its latest claim.
    latest: Vec<Option<usize>>,
}

impl<'a> Used<'a> {
    fn new(mesh: &Mesh) -> Self {
        Self { claims: Vec::new(), latest: vec![None; mesh.names().len()] }
    }

    /// Adds the axis or sub-axis `name`, if the mesh has it and nothing overlaps it yet but another part, of another
    /// `turn`, of the same dim.
    fn claim(&mut self, mesh: &Mesh, name: &'a str, place: Place, turn: usize) -> Result<SubAxis> {
        let sub = SubAxis::named(mesh, name, || place.text(turn))?;
        let previous = self.latest[sub.axis];
        let (mut at, mut same) = (previous, None);
        while let Some(position) = at {
            let other = &self.claims[position];
            let elsewhere = other.place == place && other.turn != turn;
            if !elsewhere && (other.name == name || other.sub.overlaps(sub)) {
                let (place, name, first) = (place.text(turn), name.to_owned(), other.place.text(other.turn));
                if other.name == name {
                    return Err(Error::RepeatedAxis { place, name, first });
                }
                return Err(Error::OverlappingAxes { place, name, first, other: other.name.to_owned() });
            }
            if elsewhere && other.sub == sub {
                same = Some(position);
            }
            at = other.previous;
        }
        // One claim for all parts of a dim, so that there are few however many the parts.
        if let Some(position) = same {
            self.claims[position].turn = turn;
        } else {
            self.latest[sub.axis] = Some(self.claims.len());
            self.claims.push(Claim { sub, name, place, turn, previous });
        }
        Ok(sub)
    }
}

#[cfg(test)]
mod tests;
