//! A layout as TensorFlow has it: one mesh axis or a special value per tensor dim.

use std::sync::Arc;

use super::{ANY, Error, MATCH, MAX_RANK, Mesh, Result, UNSHARDED};
use crate::{error::Error as CoreError, layout::Layout as Cuts, partition::Partition, uneven::Uneven};

/// The form of a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayoutKind {
    /// A layout over no mesh.
    Empty,
    /// The layout as declared, on a mesh with axes.
    Static,
    /// A tensor that lies on one device.
    SingleDevice,
    /// Like static, with dims that TensorFlow treats as independent.
    Parted,
}

impl LayoutKind {
    /// The form in words, for messages.
    #[must_use]
    pub fn form(self) -> &'static str {
        match self {
            Self::Empty => "an empty layout",
            Self::Static => "a static layout",
            Self::SingleDevice => "a single-device layout",
            Self::Parted => "a parted layout",
        }
    }
}

/// The spec of a tensor dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Spec {
    /// Not cut.
    Unsharded,
    /// Cut as the tensor that is laid out anew is cut there.
    Match,
    /// Any cut: TensorFlow's propagation chooses.
    Any,
    /// The mesh axis at this position.
    Axis(usize),
}

/// A layout over a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    kind: LayoutKind,
    specs: Vec<Spec>,
    mesh: Arc<Mesh>,
}

impl Layout {
    /// The layout of the given form whose dims are cut by `specs`: axes of the mesh, `unsharded`, `match` or `any`.
    ///
    /// # Errors
    /// A form that does not go with the mesh, more than [`MAX_RANK`] dims, a spec that the mesh does not have, an axis or
    /// `match` on two dims.
    pub fn new<S: AsRef<str>>(kind: LayoutKind, specs: &[S], mesh: Arc<Mesh>) -> Result<Self> {
        let fits = match kind {
            LayoutKind::Empty => *mesh == Mesh::Empty && specs.is_empty(),
            LayoutKind::SingleDevice => matches!(*mesh, Mesh::SingleDevice(_)) && specs.is_empty(),
            LayoutKind::Static | LayoutKind::Parted => mesh.tiled().is_some(),
        };
        if !fits {
            return Err(Error::WrongMesh { layout: kind.form(), mesh: mesh.form() });
        }
        check_rank(i64::try_from(specs.len()).unwrap_or(i64::MAX))?;
        let mut layout = Self { kind, specs: Vec::with_capacity(specs.len()), mesh };
        for (dim, spec) in specs.iter().enumerate() {
            let spec = layout.read_spec(dim, spec.as_ref())?;
            if matches!(spec, Spec::Axis(_) | Spec::Match)
                && let Some(first) = layout.specs.iter().position(|&earlier| earlier == spec)
            {
                let spec = layout.spec_text(spec).to_owned();
                return Err(Error::RepeatedSpec { spec, first, second: dim });
            }
            layout.specs.push(spec);
        }
        Ok(layout)
    }

    /// The layout of a tensor that lies on the one device of `mesh`.
    ///
    /// # Errors
    /// If the mesh is of another form.
    pub fn on_single_device(mesh: Arc<Mesh>) -> Result<Self> {
        Self::new::<&str>(LayoutKind::SingleDevice, &[], mesh)
    }

    /// The layout of no mesh.
    #[must_use]
    pub fn empty() -> Self {
        Self { kind: LayoutKind::Empty, specs: Vec::new(), mesh: Arc::new(Mesh::Empty) }
    }

    /// The layout of rank `rank` that cuts dim `axis` by `spec` and no other.
    ///
    /// # Errors
    /// A rank below 0 or over [`MAX_RANK`], a dim that it does not have, and those of [`Layout::new`].
    pub fn cut_at(mesh: Arc<Mesh>, spec: &str, rank: i64, axis: i64) -> Result<Self> {
        let mut specs = vec![UNSHARDED; check_rank(rank)?];
        let rank = specs.len();
        let slot = usize::try_from(axis).ok().and_then(|axis| specs.get_mut(axis));
        *slot.ok_or(Error::DimOutside { dim: axis, rank })? = spec;
        Self::new(LayoutKind::Static, &specs, mesh)
    }

    /// The layout of rank `rank` that cuts nothing.
    ///
    /// # Errors
    /// A rank below 0 or over [`MAX_RANK`]; a mesh without axes.
    pub fn replicated(mesh: Arc<Mesh>, rank: i64) -> Result<Self> {
        Self::new(LayoutKind::Static, &vec![UNSHARDED; check_rank(rank)?], mesh)
    }

    /// The same layout without the given dims.
    ///
    /// # Errors
    /// A dim that the layout has not.
    pub fn delete(&self, dims: &[i64]) -> Result<Self> {
        let mut keep = vec![true; self.rank()];
        for &dim in dims {
            keep[self.check_dim(dim)?] = false;
        }
        let specs = self.specs.iter().zip(keep).filter(|&(_, keep)| keep).map(|(&spec, _)| spec).collect();
        Ok(Self { kind: self.kind, specs, mesh: Arc::clone(&self.mesh) })
    }

    /// The parted layout of the same cuts.
    ///
    /// # Errors
    /// If the layout lies on no mesh with axes.
    pub fn to_parted(&self) -> Result<Self> {
        self.mesh.tiled().ok_or(Error::WrongMesh { layout: LayoutKind::Parted.form(), mesh: self.mesh.form() })?;
        Ok(Self { kind: LayoutKind::Parted, ..self.clone() })
    }

    /// The form of the layout.
    #[must_use]
    pub fn kind(&self) -> LayoutKind {
        self.kind
    }

    /// The mesh.
    #[must_use]
    pub fn mesh(&self) -> &Arc<Mesh> {
        &self.mesh
    }

    /// The spec of each dim.
    #[must_use]
    pub fn specs(&self) -> &[Spec] {
        &self.specs
    }

    /// The spec of each dim, as it is written.
    pub fn spec_texts(&self) -> impl ExactSizeIterator<Item = &str> {
        self.specs.iter().map(|&spec| self.spec_text(spec))
    }

    /// The number of dims.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.specs.len()
    }

    /// True if no dim is cut. A tensor on one device is not replicated.
    #[must_use]
    pub fn is_fully_replicated(&self) -> bool {
        self.kind != LayoutKind::SingleDevice && self.specs.iter().all(|&spec| spec == Spec::Unsharded)
    }

    /// True if the first dim is cut and no other.
    #[must_use]
    pub fn is_batch_parallel(&self) -> bool {
        let cut = |spec: &Spec| *spec != Spec::Unsharded;
        self.specs.split_first().is_some_and(|(first, rest)| cut(first) && !rest.iter().any(cut))
    }

    /// The number of shards of the dim.
    ///
    /// # Errors
    /// A dim that the layout has not, or one that `match` or `any` leaves open.
    pub fn num_shards(&self, dim: i64) -> Result<i64> {
        let dim = self.check_dim(dim)?;
        self.shards_of(dim)
    }

    /// The number of shards of each dim.
    ///
    /// # Errors
    /// A dim that `match` or `any` leaves open.
    pub fn all_num_shards(&self) -> Result<Vec<i64>> {
        (0..self.rank()).map(|dim| self.shards_of(dim)).collect()
    }

    /// The same layout in the words of the core.
    ///
    /// # Errors
    /// A layout without axes, or one that `match` or `any` leaves open.
    pub fn cuts(&self) -> Result<Cuts> {
        let tiled = self.mesh.tiled().ok_or(Error::NoShards { layout: self.kind.form() })?;
        let names = tiled.axes().names();
        let specs = (0..self.rank())
            .map(|dim| match self.specs[dim] {
                Spec::Axis(axis) => Ok(vec![names[axis].as_str()]),
                Spec::Unsharded => Ok(Vec::new()),
                Spec::Match | Spec::Any => Err(self.undetermined(dim)),
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Cuts::new(Arc::clone(tiled.axes()), &specs, &[])?)
    }

    /// The partition of a tensor that has one element per shard: its shard ids are the layout's.
    ///
    /// # Errors
    /// Those of [`Layout::cuts`].
    pub fn unit_partition(&self) -> Result<Partition> {
        let cuts = self.cuts()?;
        let shape = cuts.num_shards().to_vec();
        Ok(Partition::new(Arc::new(cuts), &shape, Uneven::Even)?)
    }

    /// The shape of a tensor of which every device holds `local`; -1 stands for an unknown size.
    ///
    /// # Errors
    /// A shape of another rank, a size below -1, a product over 2^63 - 1, a dim that is left open.
    pub fn global_shape(&self, local: &[i64]) -> Result<Vec<i64>> {
        self.map_shape(local, |_, n, k| {
            let overflow = || CoreError::Overflow { what: format!("local size {n} times {k} shards") };
            Ok(n.checked_mul(k).ok_or_else(overflow)?)
        })
    }

    /// The shape that every device holds of a tensor of shape `global`; -1 stands for an unknown size.
    ///
    /// # Errors
    /// A shape of another rank, a size below -1, a size that its shards do not divide, a dim that is left open.
    pub fn local_shape(&self, global: &[i64]) -> Result<Vec<i64>> {
        self.map_shape(
            global,
            |dim, n, k| if n % k == 0 { Ok(n / k) } else { Err(CoreError::Indivisible { dim, n, k }.into()) },
        )
    }

    fn map_shape(&self, shape: &[i64], resize: impl Fn(usize, i64, i64) -> Result<i64>) -> Result<Vec<i64>> {
        if let Some((dim, &size)) = shape.iter().enumerate().find(|&(_, &size)| size < -1) {
            return Err(CoreError::NegativeDim { dim, size }.into());
        }
        if matches!(self.kind, LayoutKind::SingleDevice | LayoutKind::Empty) {
            return Ok(shape.to_vec());
        }
        if shape.len() != self.rank() {
            return Err(CoreError::Rank { given: shape.len(), rank: self.rank() }.into());
        }
        let resize = |(dim, &n): (usize, &i64)| {
            let k = self.shards_of(dim)?;
            if n == -1 { Ok(-1) } else { resize(dim, n, k) }
        };
        shape.iter().enumerate().map(resize).collect()
    }

    /// The row-major number of the shard at `index`, one number per dim.
    ///
    /// # Errors
    /// An index of another length than the rank, a number outside its dim, a dim that `match` or `any` leaves open.
    pub fn shard_id(&self, index: &[i64]) -> Result<i64> {
        let rank = self.rank();
        if index.len() != rank {
            return Err(Error::IndexRank { given: index.len(), rank });
        }
        ravel(index, |dim| self.shards_of(dim), 0)
    }

    /// Fills `out` with the numbers of the shards at `indices`, which holds one index after the other.
    ///
    /// # Errors
    /// Those of [`Layout::shard_id`], with the position in `indices`; then `out` is not complete.
    #[inline(never)]
    pub fn shard_ids_into(&self, indices: &[i64], out: &mut [i64]) -> Result<()> {
        let rank = self.rank();
        if out.len().checked_mul(rank) != Some(indices.len()) {
            return Err(Error::IndexRank { given: indices.len() / out.len().max(1), rank });
        }
        let shards = self.all_num_shards()?;
        for (row, id) in out.iter_mut().enumerate() {
            *id = ravel(&indices[row * rank..][..rank], |dim| Ok(shards[dim]), row * rank)?;
        }
        Ok(())
    }

    fn shards_of(&self, dim: usize) -> Result<i64> {
        match self.specs[dim] {
            Spec::Unsharded => Ok(1),
            Spec::Axis(axis) => Ok(self.mesh.shape()[axis]),
            Spec::Match | Spec::Any => Err(self.undetermined(dim)),
        }
    }

    fn undetermined(&self, dim: usize) -> Error {
        let spec = if self.specs[dim] == Spec::Any { ANY } else { MATCH };
        Error::Undetermined { dim, spec }
    }

    fn read_spec(&self, dim: usize, text: &str) -> Result<Spec> {
        match text {
            UNSHARDED => return Ok(Spec::Unsharded),
            MATCH => return Ok(Spec::Match),
            ANY => return Ok(Spec::Any),
            _ => {}
        }
        let names = self.mesh.dim_names();
        let axis = names.iter().position(|name| name == text);
        let unknown = || Error::UnknownSpec { dim, spec: text.to_owned(), axes: names.to_vec() };
        Ok(Spec::Axis(axis.ok_or_else(unknown)?))
    }

    fn spec_text(&self, spec: Spec) -> &str {
        match spec {
            Spec::Unsharded => UNSHARDED,
            Spec::Match => MATCH,
            Spec::Any => ANY,
            Spec::Axis(axis) => &self.mesh.dim_names()[axis],
        }
    }

    fn check_dim(&self, dim: i64) -> Result<usize> {
        let outside = Error::DimOutside { dim, rank: self.rank() };
        usize::try_from(dim).ok().filter(|&dim| dim < self.rank()).ok_or(outside)
    }
}

fn check_rank(rank: i64) -> Result<usize> {
    usize::try_from(rank).ok().filter(|&rank| rank <= MAX_RANK).ok_or(Error::RankOutside { given: rank })
}

/// The number of the shard at `index`, which stands at `start` among many; the dims are cut into `shards` each.
fn ravel(index: &[i64], shards: impl Fn(usize) -> Result<i64>, start: usize) -> Result<i64> {
    let mut id = 0;
    for (dim, &value) in index.iter().enumerate() {
        let limit = shards(dim)?;
        if value < 0 || value >= limit {
            return Err(
                CoreError::OutOfRange { what: "offset_tuple", position: Some(start + dim), value, limit }.into()
            );
        }
        // Never more than the number of devices: every axis cuts once.
        id = id * limit + value;
    }
    Ok(id)
}
