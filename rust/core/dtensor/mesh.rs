//! A mesh as TensorFlow has it: axes, ids for all devices, and names for those that this client holds.

use super::{
    DeviceList, DeviceSpec, Result,
    tiled_mesh::{Ids, MeshParts, TiledMesh, check_device},
};

/// A mesh: none at all, one device, or axes with devices.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Mesh {
    /// The mesh of no devices.
    Empty,
    /// One device, by its name; it has no axes.
    SingleDevice(String),
    /// Named axes with one device per position.
    Tiled(Box<TiledMesh>),
}

impl Mesh {
    /// A mesh with axes.
    ///
    /// # Errors
    /// Those of [`TiledMesh::new`].
    pub fn new(parts: MeshParts) -> Result<Self> {
        Ok(Self::Tiled(Box::new(TiledMesh::new(parts)?)))
    }

    /// The mesh of one device and no axes.
    ///
    /// # Errors
    /// If `device` is not a device name, or leaves its type open.
    pub fn from_device(device: &str) -> Result<Self> {
        check_device("device", device)?;
        Ok(Self::SingleDevice(device.to_owned()))
    }

    /// The part that only a mesh with axes has.
    #[must_use]
    pub fn tiled(&self) -> Option<&TiledMesh> {
        if let Self::Tiled(tiled) = self { Some(tiled) } else { None }
    }

    /// The form in words, for messages.
    #[must_use]
    pub fn form(&self) -> &'static str {
        match self {
            Self::Empty => "an empty mesh",
            Self::SingleDevice(_) => "a single-device mesh",
            Self::Tiled(_) => "a mesh with axes",
        }
    }

    /// The mesh's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.tiled().map_or("", |tiled| &tiled.name)
    }

    /// The axis names.
    #[must_use]
    pub fn dim_names(&self) -> &[String] {
        self.tiled().map_or(&[], |tiled| tiled.axes.names())
    }

    /// The axis sizes.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        self.tiled().map_or(&[], |tiled| tiled.axes.sizes())
    }

    /// The stride of each axis: the growth of the device index with the axis's coordinate.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        self.tiled().map_or(&[], |tiled| tiled.axes.strides())
    }

    /// The number of positions; a single device has none, having no axes.
    #[must_use]
    pub fn size(&self) -> i64 {
        self.tiled().map_or(0, |tiled| tiled.axes.size())
    }

    /// The ids of all devices.
    #[must_use]
    pub fn global_ids(&self) -> std::ops::Range<i64> {
        self.tiled().map_or(0..0, TiledMesh::global_ids)
    }

    /// The ids of the devices that this client holds.
    #[must_use]
    pub fn local_ids(&self) -> &[i64] {
        self.tiled().map_or(&[], |tiled| &tiled.local_ids)
    }

    /// The names of the devices that this client holds.
    #[must_use]
    pub fn local_devices(&self) -> Option<&DeviceList> {
        self.tiled().map(|tiled| &tiled.local_devices)
    }

    /// True if XLA partitions programs.
    #[must_use]
    pub fn use_xla_spmd(&self) -> bool {
        self.tiled().is_some_and(|tiled| tiled.use_xla_spmd)
    }

    /// The type of the devices; empty for the empty mesh.
    #[must_use]
    pub fn device_type(&self) -> &str {
        let device = match self {
            Self::Empty => None,
            Self::SingleDevice(device) => Some(device.as_str()),
            Self::Tiled(tiled) => tiled.local_devices.get(0).or_else(|| tiled.global_devices.get(0)),
        };
        let spec = device.and_then(|device| DeviceSpec::parse(device).ok());
        spec.and_then(|spec| spec.device_type).unwrap_or("")
    }

    /// Writes the coordinate of the device `index`, counted round and round the mesh, into `out`.
    ///
    /// A mesh without axes has nothing to write.
    pub fn wrapped_coordinate(&self, index: i64, out: &mut [i64]) {
        let mut rest = if self.size() > 0 { index.rem_euclid(self.size()) } else { 0 };
        for (entry, &size) in out.iter_mut().zip(self.shape()).rev() {
            *entry = rest % size;
            rest /= size;
        }
    }

    /// The same mesh of the CPUs of the devices' hosts.
    ///
    /// As in TensorFlow the mesh's name, its global devices and `use_xla_spmd` are left behind, and a device of which the
    /// job is known gets its full name. Where TensorFlow would give a mesh without any device, its global devices stay.
    ///
    /// # Errors
    /// None for a mesh that was checked.
    pub fn host_mesh(&self) -> Result<Self> {
        let tiled = match self {
            Self::Empty => return Ok(Self::Empty),
            Self::SingleDevice(device) => return Self::from_device(&host_device(device)),
            Self::Tiled(tiled) => tiled,
        };
        let on_hosts = |devices: &DeviceList| {
            let mut hosts = DeviceList::with_capacity(devices.len());
            devices.iter().for_each(|device| hosts.push(&host_device(device)));
            hosts
        };
        let remote = tiled.local_ids.is_empty();
        Self::new(MeshParts {
            name: String::new(),
            dim_names: tiled.axes.names().to_vec(),
            shape: tiled.axes.sizes().to_vec(),
            global_ids: Ids::consecutive(tiled.first_id, usize::try_from(tiled.axes.size()).unwrap_or(usize::MAX)),
            local_ids: tiled.local_ids.clone(),
            local_devices: on_hosts(&tiled.local_devices),
            global_devices: if remote { on_hosts(&tiled.global_devices) } else { DeviceList::default() },
            use_xla_spmd: false,
        })
    }
}

/// The CPU of the host of `device`, with the same index.
fn host_device(device: &str) -> String {
    let spec = DeviceSpec::parse(device).unwrap_or_default();
    // A name that tells its job is completed, as TensorFlow does; one that does not is a local name and stays one.
    let complete = |part: Option<i64>| if spec.job.is_some() { part.or(Some(0)) } else { part };
    DeviceSpec {
        job: spec.job,
        replica: complete(spec.replica),
        task: complete(spec.task),
        device_type: Some("CPU"),
        device_index: complete(spec.device_index),
    }
    .to_string()
}
