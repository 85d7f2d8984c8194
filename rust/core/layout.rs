//! A layout: for each tensor dim, the mesh axes that cut it (rule 2.2).

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    mesh::Mesh,
    radix,
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
    /// [`Error::UnknownAxis`] for a name that the mesh has not, [`Error::RepeatedAxis`] for one used twice.
    pub fn new<S: AsRef<str>, D: AsRef<[S]>>(mesh: Arc<Mesh>, specs: &[D], unreduced: &[S]) -> Result<Self> {
        let mut roles = vec![AxisRole::Replicates; mesh.names().len()];
        let mut num_shards = vec![1; specs.len()];
        let mut positions = Vec::with_capacity(specs.len());
        for (dim, spec) in specs.iter().enumerate() {
            let spec = spec.as_ref();
            let mut axes = vec![0; spec.len()];
            // From minor to major, so that each axis's weight is the product of what has gone before.
            for (slot, name) in axes.iter_mut().zip(spec).rev() {
                let axis = claim(&mesh, &roles, name.as_ref(), Place::Dim(dim))?;
                roles[axis] = AxisRole::Cuts { dim, weight: num_shards[dim] };
                // At most the size of the mesh: each axis cuts once.
                num_shards[dim] *= mesh.sizes()[axis];
                *slot = axis;
            }
            positions.push(axes);
        }
        for name in unreduced {
            let axis = claim(&mesh, &roles, name.as_ref(), Place::Unreduced)?;
            roles[axis] = AxisRole::Unreduced;
        }
        let axis_sizes = positions.iter().map(|spec| spec.iter().map(|&axis| mesh.sizes()[axis]).collect()).collect();
        let shard_strides = radix::strides(&num_shards);
        // At most the number of devices.
        let total_shards = num_shards.iter().product();
        Ok(Self { mesh, specs: positions, roles, axis_sizes, num_shards, shard_strides, total_shards })
    }

    /// The mesh.
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
enum Place {
    Dim(usize),
    Unreduced,
}

impl Place {
    fn text(&self) -> String {
        match self {
            Self::Dim(dim) => format!("axes[{dim}]"),
            Self::Unreduced => "unreduced".to_owned(),
        }
    }
}

/// The position of axis `name`, if the mesh has it and nothing uses it yet.
fn claim(mesh: &Mesh, roles: &[AxisRole], name: &str, place: Place) -> Result<usize> {
    let axis = mesh.axis(name).ok_or_else(|| Error::UnknownAxis {
        place: place.text(),
        name: name.to_owned(),
        axes: mesh.names().to_vec(),
    })?;
    let first = match roles[axis] {
        AxisRole::Replicates => return Ok(axis),
        AxisRole::Cuts { dim, .. } => Place::Dim(dim),
        AxisRole::Unreduced => Place::Unreduced,
    };
    Err(Error::RepeatedAxis { place: place.text(), name: name.to_owned(), first: first.text() })
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
