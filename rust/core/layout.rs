//! A layout: for each tensor dim, the mesh axes that cut it (rule 2.2).

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    mesh::Mesh,
    radix,
    sub_axis::{Refined, SubAxis},
};

/// What a mesh axis does in a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AxisRole {
    /// It cuts `dim`; one step along it is `weight` steps of the shard index there.
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
}

impl Layout {
    /// The layout whose dim `i` is cut by the axes `specs[i]`, first axis major, with partial sums over `unreduced`.
    ///
    /// # Errors
    /// [`Error::UnknownAxis`] for a name that the mesh has not, [`Error::RepeatedAxis`] for one used twice,
    /// [`Error::SubAxisSize`], [`Error::OverlappingAxes`] or [`Error::SubAxesClash`] for sub-axes that do not fit.
    pub fn new<S: AsRef<str>, D: AsRef<[S]>>(mesh: Arc<Mesh>, specs: &[D], unreduced: &[S]) -> Result<Self> {
        let mut used = Used::new(&mesh);
        for (dim, spec) in specs.iter().enumerate() {
            for name in spec.as_ref() {
                used.claim(&mesh, name.as_ref(), Place::Dim(dim))?;
            }
        }
        for name in unreduced {
            used.claim(&mesh, name.as_ref(), Place::Unreduced)?;
        }
        let refined = Refined::new(mesh, used.claims.iter().map(|claim| claim.sub))?;
        let mesh = refined.mesh.clone();
        let mut roles = vec![AxisRole::Replicates; mesh.names().len()];
        let mut num_shards = vec![1; specs.len()];
        let mut positions = vec![Vec::new(); specs.len()];
        for &Claim { sub, place, .. } in &used.claims {
            match place {
                Place::Dim(dim) => positions[dim].extend(refined.axes_of(sub)),
                Place::Unreduced => refined.axes_of(sub).for_each(|axis| roles[axis] = AxisRole::Unreduced),
            }
        }
        for (dim, spec) in positions.iter().enumerate() {
            // From minor to major, so that each axis's weight is the product of what has gone before.
            for &axis in spec.iter().rev() {
                roles[axis] = AxisRole::Cuts { dim, weight: num_shards[dim] };
                // At most the size of the mesh: each axis cuts once.
                num_shards[dim] *= mesh.sizes()[axis];
            }
        }
        let axis_sizes = positions.iter().map(|spec| spec.iter().map(|&axis| mesh.sizes()[axis]).collect()).collect();
        let shard_strides = radix::strides(&num_shards);
        // At most the number of devices.
        let total_shards = num_shards.iter().product();
        Ok(Self { mesh, specs: positions, roles, axis_sizes, num_shards, shard_strides, total_shards })
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

/// Where in the arguments an axis is named.
#[derive(Clone, Copy)]
enum Place {
    Dim(usize),
    Unreduced,
}

impl Place {
    fn text(self) -> String {
        match self {
            Self::Dim(dim) => format!("axes[{dim}]"),
            Self::Unreduced => "unreduced".to_owned(),
        }
    }
}

/// A use of an axis or a sub-axis.
struct Claim<'a> {
    sub: SubAxis,
    name: &'a str,
    place: Place,
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

    /// Adds the axis or sub-axis `name`, if the mesh has it and nothing overlaps it yet.
    fn claim(&mut self, mesh: &Mesh, name: &'a str, place: Place) -> Result<()> {
        let sub = SubAxis::named(mesh, name, || place.text())?;
        let previous = self.latest[sub.axis];
        let mut at = previous;
        while let Some(other) = at.map(|at| &self.claims[at]) {
            if other.name == name || other.sub.overlaps(sub) {
                let (place, name, first) = (place.text(), name.to_owned(), other.place.text());
                if other.name == name {
                    return Err(Error::RepeatedAxis { place, name, first });
                }
                return Err(Error::OverlappingAxes { place, name, first, other: other.name.to_owned() });
            }
            at = other.previous;
        }
        self.latest[sub.axis] = Some(self.claims.len());
        self.claims.push(Claim { sub, name, place, previous });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Arc<Mesh> {
        Arc::new(Mesh::new(&["x", "y", "z"], &[2, 3, 4]).unwrap())
    }

    #[test]
    fn the_first_axis_of_a_spec_is_major() {
        let layout = Layout::new(mesh(), &[&["x", "y"][..]], &[]).unwrap();
        assert_eq!(layout.roles()[..2], [AxisRole::Cuts { dim: 0, weight: 3 }, AxisRole::Cuts { dim: 0, weight: 1 }]);
        let turned = Layout::new(mesh(), &[&["y", "x"][..]], &[]).unwrap();
        assert_eq!(turned.roles()[..2], [AxisRole::Cuts { dim: 0, weight: 1 }, AxisRole::Cuts { dim: 0, weight: 2 }]);
        assert_ne!(layout, turned);
    }

    #[test]
    fn an_axis_is_used_once() {
        let twice = Layout::new(mesh(), &[&["x"][..], &["y", "x"]], &[]);
        assert_eq!(
            twice.unwrap_err().to_string(),
            "axes[1] uses axis \"x\", which axes[0] uses already; a mesh axis cuts at most one dim, once"
        );
        assert!(matches!(Layout::new(mesh(), &[&["x", "x"][..]], &[]), Err(Error::RepeatedAxis { .. })));
        assert!(matches!(Layout::new(mesh(), &[&["x"][..]], &["x"]), Err(Error::RepeatedAxis { .. })));
        assert!(matches!(Layout::new(mesh(), &[&["x"][..]], &["y", "y"]), Err(Error::RepeatedAxis { .. })));
        assert!(matches!(Layout::new(mesh(), &[&["w"][..]], &[]), Err(Error::UnknownAxis { .. })));
    }

    #[test]
    fn axes_that_cut_nothing_replicate_unless_unreduced() {
        let layout = Layout::new(mesh(), &[&["y"][..]], &["z"]).unwrap();
        assert_eq!((layout.replicated_axes(), layout.unreduced_axes()), (vec![0], vec![2]));
    }
}
