# An image with the program, the libraries it names, certificate authorities, and nothing else: no shell, no package manager. What is in it
# `cargo xtask image` decides and checks, here and in CI, where there is no container engine.
#   docker build -t registry.example.com/perfusion:0.1.0 .
FROM debian:bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl gcc git libc6-dev
ENV CARGO_HOME=/usr/local/cargo RUSTUP_HOME=/usr/local/rustup PATH="/usr/local/cargo/bin:${PATH}"
RUN curl -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --default-toolchain 1.95
WORKDIR /src
COPY . .
RUN cargo xtask image

FROM scratch
COPY --from=build /src/target/image/ /
ENTRYPOINT ["/usr/bin/perfusion"]
CMD ["daemon", "--config", "/etc/perfusion/perfusion.yaml"]
