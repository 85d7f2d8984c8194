//! The messages `MeshProto` and `LayoutProto` of TensorFlow's `layout.proto`.
//!
//! Written are the fields in the order of their numbers, those with default values left out and lists of numbers packed,
//! as every protocol buffer library does, so that equal values give equal bytes. The reader is our own rather than a
//! generated one for three reasons: it names the byte that is wrong, it refuses a million empty fields before it keeps
//! them, and it reads names straight into a [`DeviceList`].

use std::sync::Arc;

use super::{
    DeviceList, Error, Ids, Layout, LayoutKind, MAX_AXES, MAX_RANK, Mesh, MeshParts, Result,
    tiled_mesh::TiledMesh,
    wire::{Field, Reader, put_bytes, put_number, put_packed, put_text},
};

const MESH: &str = "MeshProto";
const LAYOUT: &str = "LayoutProto";

/// The fields of a `MeshProto`, which need not fit together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeshMessage {
    /// Field 1: name and size of each axis.
    pub mesh_dimensions: Vec<(String, i64)>,
    /// Field 2.
    pub global_device_ids: Vec<i64>,
    /// Field 3.
    pub name: String,
    /// Field 4.
    pub local_device_ids: Vec<i64>,
    /// Field 5.
    pub local_devices: DeviceList,
    /// Field 6.
    pub global_devices: DeviceList,
    /// Field 7.
    pub use_xla_spmd: bool,
    /// Field 8.
    pub single_device: String,
}

/// The fields of a `LayoutProto`, which need not fit together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayoutMessage {
    /// Field 1.
    pub sharding_specs: Vec<String>,
    /// Field 2.
    pub mesh_config: Option<MeshMessage>,
    /// Field 3: 0 for unknown, 1 static, 2 parted, 3 single device.
    pub layout_type: i32,
}

impl MeshMessage {
    /// Reads the message.
    ///
    /// # Errors
    /// [`super::Error::Wire`] with the byte offset.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut message = Self::default();
        message.merge(Reader::new(MESH, bytes))?;
        Ok(message)
    }

    fn merge(&mut self, mut reader: Reader<'_>) -> Result<()> {
        while let Some(field) = reader.next()? {
            match field.number {
                1 => {
                    let axis = read_axis(field)?;
                    if self.mesh_dimensions.len() == MAX_AXES {
                        return Err(field.error(format!("more than {MAX_AXES} axes; a mesh has at most {MAX_AXES}")));
                    }
                    self.mesh_dimensions.push(axis);
                }
                2 => field.numbers(&mut self.global_device_ids)?,
                3 => self.name = field.text()?.to_owned(),
                4 => field.numbers(&mut self.local_device_ids)?,
                5 => self.local_devices.push(field.text()?),
                6 => self.global_devices.push(field.text()?),
                7 => self.use_xla_spmd = field.varint()? != 0,
                8 => self.single_device = field.text()?.to_owned(),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let axes = self.mesh_dimensions.iter().map(|(name, size)| (name.as_str(), *size));
        encode_mesh(MeshFields {
            axes,
            global_ids: self.global_device_ids.iter().copied(),
            name: &self.name,
            local_ids: &self.local_device_ids,
            local_devices: Some(&self.local_devices),
            global_devices: Some(&self.global_devices),
            use_xla_spmd: self.use_xla_spmd,
            single_device: &self.single_device,
        })
    }
}

fn read_axis(field: Field<'_>) -> Result<(String, i64)> {
    let mut reader = field.message("MeshDimensionProto")?;
    let (mut name, mut size) = ("", 0);
    while let Some(field) = reader.next()? {
        match field.number {
            1 => name = field.text()?,
            2 => size = field.varint()?.cast_signed(),
            _ => {}
        }
    }
    Ok((name.to_owned(), size))
}

impl LayoutMessage {
    /// Reads the message.
    ///
    /// # Errors
    /// [`super::Error::Wire`] with the byte offset.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut message = Self::default();
        let mut reader = Reader::new(LAYOUT, bytes);
        while let Some(field) = reader.next()? {
            match field.number {
                1 => {
                    let spec = read_spec(field)?;
                    if message.sharding_specs.len() == MAX_RANK {
                        return Err(field.error(format!("more than {MAX_RANK} specs; a layout has at most {MAX_RANK}")));
                    }
                    message.sharding_specs.push(spec);
                }
                // A message that comes twice is the two of them merged.
                2 => message.mesh_config.get_or_insert_default().merge(field.message(MESH)?)?,
                3 => {
                    let value = field.varint()?;
                    message.layout_type = i32::try_from(value)
                        .ok()
                        .filter(|value| (0..=3).contains(value))
                        .ok_or_else(|| field.error(format!("type is {}; it must be 0 to 3", value.cast_signed())))?;
                }
                _ => {}
            }
        }
        Ok(message)
    }

    /// Writes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mesh = self.mesh_config.as_ref().map(MeshMessage::encode);
        encode_layout(self.sharding_specs.iter().map(String::as_str), mesh.as_deref(), self.layout_type)
    }
}

fn read_spec(field: Field<'_>) -> Result<String> {
    let mut reader = field.message("ShardingSpec")?;
    let mut spec = "";
    while let Some(field) = reader.next()? {
        if field.number == 2 {
            spec = field.text()?;
        }
    }
    Ok(spec.to_owned())
}

impl Mesh {
    /// The bytes of the mesh's `MeshProto`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        encode_mesh(MeshFields {
            axes: self.dim_names().iter().map(String::as_str).zip(self.shape().iter().copied()),
            global_ids: self.global_ids(),
            name: self.name(),
            local_ids: self.local_ids(),
            local_devices: self.local_devices(),
            global_devices: self.tiled().map(TiledMesh::global_devices),
            use_xla_spmd: self.use_xla_spmd(),
            single_device: if let Self::SingleDevice(device) = self { device } else { "" },
        })
    }

    /// The mesh of a `MeshProto`.
    ///
    /// # Errors
    /// [`super::Error::Wire`] if the bytes are not such a message; the errors of [`Mesh::new`] if it does not describe a mesh.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::from_message(MeshMessage::decode(bytes)?)
    }

    /// The mesh of a message.
    ///
    /// # Errors
    /// Those of [`Mesh::new`].
    pub fn from_message(message: MeshMessage) -> Result<Self> {
        if !message.single_device.is_empty() {
            not_tiled("a single-device mesh", &message)?;
            return Self::from_device(&message.single_device);
        }
        if message.mesh_dimensions.is_empty() {
            not_tiled("an empty mesh", &message)?;
            return Ok(Self::Empty);
        }
        let mut global_ids = Ids::default();
        global_ids.extend(message.global_device_ids);
        let (dim_names, shape) = message.mesh_dimensions.into_iter().unzip();
        Self::new(MeshParts {
            name: message.name,
            dim_names,
            shape,
            global_ids,
            local_ids: message.local_device_ids,
            local_devices: message.local_devices,
            global_devices: message.global_devices,
            use_xla_spmd: message.use_xla_spmd,
        })
    }
}

impl Layout {
    /// The bytes of the layout's `LayoutProto`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let layout_type = match self.kind() {
            LayoutKind::Empty => 0,
            LayoutKind::Static => 1,
            LayoutKind::Parted => 2,
            LayoutKind::SingleDevice => 3,
        };
        encode_layout(self.spec_texts(), Some(&self.mesh().to_bytes()), layout_type)
    }

    /// The layout of a `LayoutProto`.
    ///
    /// # Errors
    /// [`super::Error::Wire`] if the bytes are not such a message; the errors of [`Mesh::new`] and [`Layout::new`] if what
    /// it says is not a mesh or a layout.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let message = LayoutMessage::decode(bytes)?;
        let mesh = Mesh::from_message(message.mesh_config.unwrap_or_default())?;
        let kind = match message.layout_type {
            1 => LayoutKind::Static,
            2 => LayoutKind::Parted,
            3 => LayoutKind::SingleDevice,
            _ => LayoutKind::Empty,
        };
        Self::new(kind, &message.sharding_specs, Arc::new(mesh))
    }
}

struct MeshFields<'a, A, I> {
    axes: A,
    global_ids: I,
    name: &'a str,
    local_ids: &'a [i64],
    local_devices: Option<&'a DeviceList>,
    global_devices: Option<&'a DeviceList>,
    use_xla_spmd: bool,
    single_device: &'a str,
}

/// Checks that the message of a mesh without axes has nothing that only a mesh with axes has.
fn not_tiled(form: &'static str, message: &MeshMessage) -> Result<()> {
    let fields = [
        ("mesh_dimensions", message.mesh_dimensions.is_empty()),
        ("global_device_ids", message.global_device_ids.is_empty()),
        ("name", message.name.is_empty()),
        ("local_device_ids", message.local_device_ids.is_empty()),
        ("local_devices", message.local_devices.is_empty()),
        ("global_devices", message.global_devices.is_empty()),
        ("use_xla_spmd", !message.use_xla_spmd),
    ];
    match fields.into_iter().find(|(_, absent)| !absent) {
        Some((field, _)) => Err(Error::NotTiled { form, field }),
        None => Ok(()),
    }
}

fn encode_mesh<'a, A, I>(mesh: MeshFields<'a, A, I>) -> Vec<u8>
where
    A: Iterator<Item = (&'a str, i64)>,
    I: Iterator<Item = i64> + Clone,
{
    let mut out = Vec::new();
    let mut axis = Vec::new();
    for (name, size) in mesh.axes {
        axis.clear();
        put_text(&mut axis, 1, name);
        put_number(&mut axis, 2, size.cast_unsigned());
        put_bytes(&mut out, 1, &axis);
    }
    put_packed(&mut out, 2, mesh.global_ids);
    put_text(&mut out, 3, mesh.name);
    put_packed(&mut out, 4, mesh.local_ids.iter().copied());
    for (field, devices) in [(5, mesh.local_devices), (6, mesh.global_devices)] {
        for device in devices.iter().flat_map(|devices| devices.iter()) {
            put_bytes(&mut out, field, device.as_bytes());
        }
    }
    put_number(&mut out, 7, u64::from(mesh.use_xla_spmd));
    put_text(&mut out, 8, mesh.single_device);
    out
}

fn encode_layout<'a>(specs: impl Iterator<Item = &'a str>, mesh: Option<&[u8]>, layout_type: i32) -> Vec<u8> {
    let mut out = Vec::with_capacity(mesh.map_or(0, <[u8]>::len) + 64);
    let mut message = Vec::new();
    for spec in specs {
        message.clear();
        put_text(&mut message, 2, spec);
        put_bytes(&mut out, 1, &message);
    }
    if let Some(mesh) = mesh {
        put_bytes(&mut out, 2, mesh);
    }
    put_number(&mut out, 3, i64::from(layout_type).cast_unsigned());
    out
}
