//! Makes the types of the two interfaces from their protobuf. Must never fetch anything.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::BoundedCodec")
        .include_file("space.rs")
        .compile_protos(&["proto/guest.proto", "proto/node.proto"], &["proto"])?;
    Ok(())
}
